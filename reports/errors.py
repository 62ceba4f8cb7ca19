"""What all readers of files raise."""

from __future__ import annotations


class ReportError(Exception):
    """A file, or a word of the command line, that cannot be used: which, what it was, what it may be."""
