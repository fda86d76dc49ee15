"""Documents: finding the files that were named, and the text in them.

    found = find(["notes", "*.pdf", "-"])
    for source in found.sources:
        document = read(source)  # raises DocumentError

Plain text needs nothing installed; other formats need the extra "documents", whose libraries are
imported at the first file that takes them. Splitting is `text.splitting`, not here.
"""

from .encodings import is_text_encoding
from .reading import Document, read
from .sources import Found, Source, find

__all__ = ["Document", "Found", "Source", "find", "is_text_encoding", "read"]
