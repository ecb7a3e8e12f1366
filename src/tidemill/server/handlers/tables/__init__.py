"""Tidemill's APIs about tables: definitions, scans, splits."""
