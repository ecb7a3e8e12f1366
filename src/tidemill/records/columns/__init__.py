"""Record batches to and from columns: numpy and Arrow instead of one object for each record.

batch ── read.read_columns ──► RecordColumns ── keys(), values() ──► Arrow
batch ◄── build.build_batch_columns ── build.split_by_bytes ─────── Arrow

Nothing is imported here: a node without tables uses some of these modules, and never loads Arrow.
"""
