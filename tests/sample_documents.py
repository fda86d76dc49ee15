"""Small documents of every format, built by hand: the tests need no binary files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence


def archive(entries: Mapping[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return buffer.getvalue()


def pdf(pages: Sequence[Sequence[str]], *, encrypt: bool = False) -> bytes:
    """One text line per string; a page without lines has a filled rectangle only. `encrypt` names a
    security handler whose password nobody knows."""
    contents = []
    for lines in pages:
        shown = [f"({line}) Tj 0 -16 Td" for line in lines]
        text = f"BT /F1 12 Tf 50 750 Td {' '.join(shown)} ET" if lines else "50 50 200 200 re f"
        contents.append(text.encode("latin-1"))
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for i, content in enumerate(contents):
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {5 + 2 * i} 0 R"
            "/Resources<</Font<</F1 3 0 R>>>>>>".encode()
        )
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
    trailer = "/Root 1 0 R"
    if encrypt:
        objects.append(
            f"<</Filter/Standard/V 2/R 3/Length 128/P -44/O<{'5a' * 32}>/U<{'3c' * 32}>>>".encode()
        )
        trailer += f"/Encrypt {len(objects)} 0 R/ID[<{'01' * 16}><{'01' * 16}>]"
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += f"trailer<</Size {len(objects) + 1}{trailer}>>\nstartxref\n{table}\n%%EOF\n".encode()
    return bytes(out)


_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def docx(body: str) -> bytes:
    """`body`: WordprocessingML with the prefix w."""
    return archive(
        {
            "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
            '<Default Extension="rels" '
            'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
            '<Override PartName="/word/document.xml" ContentType="application/'
            'vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{_PACKAGE}/relationships">'
            f'<Relationship Id="r1" Type="{_OFFICE}/officeDocument" Target="word/document.xml"/>'
            "</Relationships>",
            "word/document.xml": f'<?xml version="1.0" encoding="UTF-8"?><w:document '
            f'xmlns:w="{_WORD}"><w:body>{body}</w:body></w:document>',
        }
    )


def paragraph(text: str, style: str | None = None) -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{properties}<w:r><w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [
        "<w:tr>" + "".join(f"<w:tc>{paragraph(cell)}</w:tc>" for cell in row) + "</w:tr>"
        for row in rows
    ]
    return f"<w:tbl>{''.join(lines)}</w:tbl>"


def epub(
    chapters: Mapping[str, str],
    *,
    spine: Sequence[str] | None = None,
    extra: Mapping[str, str] | None = None,
) -> bytes:
    """`chapters`: file name -> body of XHTML; `spine`: those to read, in that order."""
    items = [
        f'<item id="i{i}" href="{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for i, name in enumerate(chapters)
    ]
    order = [list(chapters).index(name) for name in (spine or chapters)]
    references = [f'<itemref idref="i{i}"/>' for i in order]
    return archive(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:'
            'container"><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
            "OEBPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
            'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>A Small Book</dc:title>'
            f'</metadata><manifest>{"".join(items)}<item id="toc" properties="nav" '
            f'href="nav.xhtml"/></manifest><spine><itemref idref="toc"/>{"".join(references)}'
            "</spine></package>",
            "OEBPS/nav.xhtml": "<html><body><p>Contents</p></body></html>",
            **{
                f"OEBPS/{name}": '<?xml version="1.0" encoding="utf-8"?><html '
                f'xmlns="http://www.w3.org/1999/xhtml"><head><title>t</title></head>'
                f"<body>{body}</body></html>"
                for name, body in chapters.items()
            },
            **(extra or {}),
        }
    )


# The first bytes of a Word file that is protected by a password: not a zip archive, but an OLE file
# whose directory has this entry.
PROTECTED_DOCX = (
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504) + "EncryptedPackage".encode("utf-16-le")
)
