"""The APIs of cursors."""
