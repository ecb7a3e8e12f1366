"""Small files beside the segments, each written whole, with a checksum."""
