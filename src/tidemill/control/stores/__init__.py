"""The ``MetadataStore`` protocol and the stores that keep it."""
