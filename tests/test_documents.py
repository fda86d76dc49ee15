"""Documents into text: every format, encodings, and what a folder full of odd files holds."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sample_documents as sample
from hypothesis import given
from hypothesis import strategies as st

from knapspec_edge.config import Config
from knapspec_edge.errors import DocumentError, UsageError
from knapspec_edge.text.documents import Document, Source, find, read, reading


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """Write a file and read it under the name it has."""
    monkeypatch.chdir(tmp_path)

    def do(name: str, content: str | bytes, **options) -> Document:
        written(tmp_path, name, content)
        return read(Source(name, Path(name)), **options)

    return do


@pytest.fixture
def refused(reads):
    """The one line that reading such a file fails with."""

    def do(name: str, content: str | bytes) -> str:
        with pytest.raises(DocumentError) as caught:
            reads(name, content)
        line = str(caught.value)
        assert name in line
        assert "\n" not in line
        return line

    return do


# ---------------------------------------------------------------------------------------------
# Plain text and encodings


def test_plain_text(reads):
    data = "# Title\n\nÄpfel, 日本, 👋.\n"
    document = reads("a.md", data)
    assert document.text == data
    assert document.name == "a.md"
    assert document.kind == "text"
    assert document.notes == ()
    assert document.n_bytes == len(data.encode())
    assert document.sha256 == hashlib.sha256(data.encode()).hexdigest()


@pytest.mark.parametrize("name", ["a.py", "LICENSE", "x.unheard-of", "data.json"])
def test_a_named_file_of_any_ending_is_text_if_it_reads_as_text(reads, name):
    assert reads(name, "def f():\r\n    pass\r").text == "def f():\n    pass\n"


GERMAN = "Größe und Prüfung überraschten alle: Äpfel, Öl und Übermut kosten 5 € pro Stück.\n"
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю.\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("text", [GERMAN, JAPANESE])
def test_unicode_says_what_it_is(reads, encoding, text):
    document = reads("a.txt", text.encode(encoding))
    assert document.text == text
    assert document.notes == ()


@pytest.mark.parametrize(
    ("text", "encoding", "told"),
    [
        (GERMAN, "cp1252", "Windows-1252"),
        (GERMAN, "utf-16-le", "utf-16-le"),
        (GERMAN, "utf-16-be", "utf-16-be"),
        ("\u3000一つ、一人で、一日。\n" * 9, "utf-16-be", "utf-16-be"),
        (RUSSIAN * 9, "utf-16-le", "utf-16-le"),
        (GERMAN.replace("€", "Euro"), "latin-1", "Windows-1252"),
        ("Un café, l’été\n", "cp1252", "Windows-1252"),
        (RUSSIAN, "cp1251", "Windows-1251"),
        (RUSSIAN, "koi8-r", "KOI8-R"),
        (JAPANESE, "shift_jis", "CP932"),
        (JAPANESE, "euc_jp", "EUC-JP"),
        ("这是一个用简体中文写的句子,里面有很多常用的词语。", "gb18030", "GB18030"),
        ("이것은 한국어로 쓴 문장입니다. 오늘은 날씨가 좋습니다.", "euc_kr", "CP949"),
    ],
)
def test_other_encodings_are_found_out_and_said(reads, text, encoding, told):
    pytest.importorskip("chardet")
    document = reads("a.txt", text.encode(encoding))
    assert document.text == text
    assert document.notes == (f"read as {told}",)


def test_iso_2022_jp_passes_as_ascii_and_is_not(reads):
    assert reads("a.txt", JAPANESE.encode("iso2022_jp")).text == JAPANESE


def test_an_encoding_that_is_given_is_used(reads):
    assert reads("a.txt", RUSSIAN.encode("cp866"), encoding="cp866").text == RUSSIAN
    with pytest.raises(DocumentError, match="a.txt is not ascii: .* at byte 0"):
        reads("a.txt", RUSSIAN, encoding="ascii")
    with pytest.raises(UsageError, match="no encoding 'klingon'"):
        reads("a.txt", RUSSIAN, encoding="klingon")


def test_one_broken_character_does_not_change_the_encoding(reads):
    data = (JAPANESE * 10).encode()
    document = reads("a.txt", data[:-3])  # cut within the last character
    assert document.text == (JAPANESE * 10)[:-2] + "\ufffd"
    assert document.notes == ("1 broken character replaced",)


def test_marks_that_lie(refused):
    assert "begins as UTF-8" in refused("a.txt", b"\xef\xbb\xbfabc\xff")
    assert "begins as UTF-16-LE" in refused("a.txt", b"\xff\xfea")


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 9,
        b"\x7fELF\x02\x01\x01" + bytes(60) + bytes(range(256)),
        bytes(range(1, 32)) * 30,
        bytes(1000),
        b"text with " + bytes(20),
        bytes([0, 1, 2, 255]) * 500,
        bytes([1, 0, 255, 2]) * 500,
        b"".join(n.to_bytes(4, "little") for n in range(0x100, 0xD000, 7)),
        b"".join(n.to_bytes(2, "big") for n in range(0x100, 0xD000, 7)),
        ("Ab" * 1000).encode("utf-16-le"),
    ],
    ids=[
        "png",
        "elf",
        "controls",
        "zeros",
        "some zeros",
        "quads",
        "turned quads",
        "long numbers",
        "short numbers",
        "no blanks",
    ],
)
def test_binary_files(refused, data):
    for name in ("a.txt", "a.bin", "a.html"):
        assert "not text" in refused(name, data)


def test_old_manuals_and_coloured_logs_are_text(reads):
    text = "N\bNA\bAM\bME\bE\n\x1b[31mred\x1b[0m\fnext page\n"
    assert reads("a.log", text).text == text


@given(st.binary(max_size=300))
def test_any_bytes_give_text_or_one_line(tmp_path_factory, data):
    path = written(tmp_path_factory.getbasetemp(), "any.dat", data)
    try:
        document = read(Source("any.dat", path))
    except DocumentError as error:
        said = str(error)
    else:
        said = ""
        assert document.text.strip()
        document.text.encode()
        assert "\0" not in document.text
    assert "\n" not in said


# ---------------------------------------------------------------------------------------------
# Formats

PAGE = """<!doctype html><html><head><title>The Title</title><style>p {color: red}</style></head>
<body><nav>Home | About</nav><h2>First</h2><p>One <b>bold</b> &amp;
<a href="x">linked</a> paragraph.</p><script>alert("no")</script><ul><li>a</li><li>b</li></ul>
<table><tr><th>k</th><th>v</th></tr><tr><td>1</td><td>2_3*</td></tr></table>
<pre>  code
    here</pre><img src="x.png" alt="a picture"></body></html>"""


def test_html(reads):
    pytest.importorskip("markdownify")
    document = reads("page.html", PAGE)
    assert document.kind == "html"
    assert document.text == (
        "# The Title\n\n## First\n\nOne **bold** & linked paragraph.\n\n- a\n- b\n\n"
        "| k | v |\n| --- | --- |\n| 1 | 2_3* |\n\n```\n  code\n    here\n```"
    )


def test_html_is_recognised_without_an_ending_but_not_against_one(reads):
    pytest.importorskip("markdownify")
    assert reads("page", "\n <!DOCTYPE html>" + PAGE[15:]).kind == "html"
    assert reads("notes.txt", PAGE).kind == "text"


def test_the_main_content_of_a_page(reads):
    pytest.importorskip("markdownify")
    around = "<div>Menu</div>{}<footer>Imprint</footer>"
    text = reads("a.html", around.format("<main><h1>Title</h1><p>Body</p></main>")).text
    assert text == "# Title\n\nBody"
    assert "Imprint" in reads("a.html", around.format("<p>Body</p>")).text
    assert "Imprint" in reads("a.html", around.format("<main></main><p>Body</p>")).text


@pytest.mark.parametrize(
    "declaration",
    ['<meta charset="koi8-r">', '<meta http-equiv=x content="text/html; charset=koi8-r">'],
)
def test_the_encoding_that_a_page_declares(reads, declaration):
    pytest.importorskip("markdownify")
    assert reads("a.html", f"{declaration}<p>Да</p>".encode("koi8-r")).text == "Да"


def test_deeply_nested_html(reads):
    pytest.importorskip("markdownify")
    assert "deep" in reads("a.html", "<div>" * 3000 + "deep" + "</div>" * 3000).text


@pytest.mark.parametrize("odd", ["<![oops", "<![if !x]>", "<!DOCTYPE [ <!", "&#xD800;", "<?php"])
def test_odd_markup(reads, odd):
    pytest.importorskip("markdownify")
    assert "text" in reads("a.html", f"<p>text</p>{odd}<p>more</p>").text


@pytest.mark.parametrize("charset", ["undefined", "punycode", "idna", "hex", "nonsense"])
def test_a_page_that_declares_no_encoding_of_text(reads, charset):
    pytest.importorskip("markdownify")
    head = f"<html><head><meta charset='{charset}'></head><body>".encode()
    document = reads("a.html", head + "Café au lait, très bon</body></html>".encode("latin-1"))
    assert document.text == "Café au lait, très bon"


@pytest.mark.parametrize("encoding", ["hex", "rot13", "undefined", "nonsense", "a\0b"])
def test_what_is_no_encoding_of_text_cannot_be_asked_for(reads, encoding):
    with pytest.raises(UsageError, match="there is no encoding"):
        reads("a.txt", "text", encoding=encoding)


def test_an_encoding_that_tells_no_place(reads):
    with pytest.raises(DocumentError, match="is not punycode"):
        reads("a.txt", "A hare hid, and a fox came.", encoding="punycode")


def test_a_form_around_a_page_is_no_form(reads):
    pytest.importorskip("markdownify")
    search = "<form><select><option>One</select>Search</form>"
    assert reads("a.html", f"<body>{search}<p>A long text.</p></body>").text == "A long text."
    page = "<body><form id='aspnetForm'><p>A long text.</p></form></body>"
    assert reads("a.html", page).text == "A long text."


def test_html_without_text(refused):
    pytest.importorskip("markdownify")
    assert "no text" in refused("a.html", "<html><script>var x = 1</script></html>")


def test_pdf(reads):
    pytest.importorskip("pypdfium2")
    document = reads("a.pdf", sample.pdf([["First line", "second \\(2\\)"], ["Gr\xfc\xdfe"]]))
    assert document.kind == "pdf"
    assert document.text == "First line\nsecond (2)\n\nGrüße"
    assert document.notes == ()


def test_pdf_with_some_pages_scanned(reads):
    pytest.importorskip("pypdfium2")
    document = reads("a.pdf", sample.pdf([["Text"], [], []]))
    assert document.text == "Text"
    assert document.notes == ("2 of 3 pages have no text",)


def test_pdf_by_content_whatever_its_name(reads):
    pytest.importorskip("pypdfium2")
    assert reads("a.txt", b"junk\n" + sample.pdf([["Text"]])).kind == "pdf"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pdf.md", "# Notes\nSuch a file begins with %PDF-1.7 and ends with %%EOF.\n"),
        ("pdf.txt", "%PDF-1.7 is how a PDF begins.\n"),
        ("gguf.md", "GGUF is a format for models.\n"),
        ("zip.md", "PK is how archives begin.\n"),
    ],
)
def test_text_about_a_format_is_text(reads, name, content):
    assert reads(name, content).text == content


def test_pdf_without_text_or_that_cannot_be_opened(refused):
    pytest.importorskip("pypdfium2")
    assert "no text in its 2 pages" in refused("scan.pdf", sample.pdf([[], []]))
    assert "ocrmypdf" in refused("scan.pdf", sample.pdf([[]]))
    assert "password" in refused("secret.pdf", sample.pdf([["Text"]], encrypt=True))
    assert "damaged" in refused("cut.pdf", sample.pdf([["Text"]])[:60])


def test_docx(reads):
    pytest.importorskip("mammoth")
    body = (
        sample.paragraph("Title", "Heading1")
        + sample.paragraph("One &amp; two.")
        + sample.table([["a", "b"], ["c", "日本"]])
    )
    document = reads("a.docx", sample.docx(body))
    assert document.kind == "docx"
    assert document.text.startswith("# Title\n\nOne & two.\n\n")
    assert re.search(r"\| c \| 日本 \|", document.text)


def test_docx_that_cannot_be_read(refused):
    pytest.importorskip("mammoth")
    whole = sample.docx(sample.paragraph("Text"))
    assert "password" in refused("secret.docx", sample.PROTECTED_DOCX)
    assert "old format" in refused("a.doc", sample.PROTECTED_DOCX[:100] + bytes(100))
    assert "damaged" in refused("cut.docx", whole[: len(whole) // 2])
    assert "damaged" in refused("bad.docx", sample.archive({"word/document.xml": "<w:p"}))
    assert "not Word after all" in refused("text.docx", "This is text.")
    assert "no text" in refused("blank.docx", sample.docx(sample.paragraph(" ")))


def test_epub_in_reading_order(reads):
    pytest.importorskip("markdownify")
    chapters = {"b two.xhtml": "<p>Second &#233;</p>", "a.xhtml": "<h1>One</h1><p>First</p>"}
    document = reads("a.epub", sample.epub(chapters, spine=["a.xhtml", "b two.xhtml"]))
    assert document.kind == "epub"
    assert document.text == "# A Small Book\n\n# One\n\nFirst\n\nSecond é"
    assert document.notes == ()


def test_epub_that_cannot_be_read(refused):
    pytest.importorskip("markdownify")
    drm = {
        "META-INF/encryption.xml": "<encryption><EncryptedData><CipherData>"
        '<CipherReference URI="OEBPS/a.xhtml"/></CipherData></EncryptedData></encryption>'
    }
    assert "DRM" in refused("a.epub", sample.epub({"a.xhtml": "x"}, extra=drm))
    broken = {"META-INF/container.xml": "<container/>"}
    told = "b.epub is damaged, or not EPUB after all: its list of contents is missing"
    assert refused("b.epub", sample.archive(broken)) == told
    absent = sample.archive(
        {"META-INF/container.xml": '<container><rootfile full-path="a.opf"/></container>'}
    )
    assert refused("b.epub", absent) == told
    package = '<package><item id="a" href="a.xhtml"/><itemref idref="a"/></package>'
    container = '<container><rootfile full-path="b.opf"/></container>'
    book = sample.archive({"META-INF/container.xml": container, "b.opf": package})
    assert refused("d.epub", book) == "d.epub holds no text (1 of 1 chapters are missing)"
    entities = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa">' + "".join(
        f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9)
    )
    bomb = {"META-INF/container.xml": f"{entities}]><x>&j;</x>"}
    assert "damaged" in refused("c.epub", sample.archive(bomb))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (sample.archive({"a.txt": "text"}), "unpack it"),
        (sample.archive({"xl/workbook.xml": ""}), "Excel"),
        (sample.archive({"ppt/presentation.xml": ""}), "PowerPoint"),
        (sample.archive({"content.xml": ""}), "OpenDocument"),
        (b"{\\rtf1 text}", "RTF"),
        (b"GGUF\x03\x00\x00\x00", "a model"),
    ],
)
def test_formats_that_are_known_and_not_read(refused, content, told):
    assert told in refused("a.dat", content)


def test_what_unpacks_to_too_much_is_not_unpacked(refused, monkeypatch):
    limited = Config(document_bytes_max=10_000)
    monkeypatch.setattr("knapspec_edge.text.documents.archives.DEFAULTS", limited)
    entries = {"META-INF/container.xml": "", "a.xhtml": "a" * 20_000}
    assert "unpacks to" in refused("a.epub", sample.archive(entries))
    # chapters may be named anything, and one of them many times
    package = '<package><item id="a" href="a.dat"/>' + '<itemref idref="a"/>' * 4 + "</package>"
    entries = {
        "META-INF/container.xml": '<container><rootfile full-path="b.opf"/></container>',
        "b.opf": package,
        "a.dat": "a" * 3_000,
    }
    assert "unpacks to" in refused("a.epub", sample.archive(entries))


# ---------------------------------------------------------------------------------------------
# What cannot be read at all


def test_what_nobody_could_see_is_no_text(refused):
    assert refused("a.txt", "\u200b\u2060\ufeff\n") == "a.txt holds no text"


def test_a_docx_of_pictures_only(refused):
    pytest.importorskip("mammoth")
    assert refused("a.docx", sample.docx("")) == "a.docx holds no text, at most pictures"


def test_closed_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DocumentError, match="standard input is closed"):
        read(Source("-", None))


def test_empty_and_blank_files(refused):
    for name in ("a.txt", "a.pdf", "a.docx", "a.html"):
        assert refused(name, b"") == f"{name} is empty"
    assert "blanks" in refused("a.txt", " \n\t\n")
    assert "no text" in refused("a.txt", "\u3000\u00a0\n")


def test_large_files_and_endless_pipes_are_not_read_to_their_end(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(reading, "DEFAULTS", Config(document_bytes_max=1 << 20))
    assert "more than 1 MiB" in refused("a.txt", b"a" * ((1 << 20) + 1))
    endless = Source("zero", Path("/dev/zero"))
    if endless.path is not None and endless.path.exists():
        with pytest.raises(DocumentError, match="zero has more than 1 MiB"):
            read(endless)


def test_a_file_that_is_gone(tmp_path):
    with pytest.raises(DocumentError, match="cannot read gone.txt: No such file"):
        read(Source("gone.txt", tmp_path / "gone.txt"))
    with pytest.raises(DocumentError, match="cannot read folder: .*[Dd]irectory"):
        read(Source("folder", tmp_path))


# ---------------------------------------------------------------------------------------------
# Standard input


class Input:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", Input(b"piped\r\ntext"))
    (source,) = find(["-", "-"]).sources
    document = read(source)
    assert (document.name, document.text, document.kind) == ("-", "piped\ntext", "text")
    with pytest.raises(DocumentError, match="standard input is empty"):
        read(source)


def test_standard_input_may_be_any_format(monkeypatch):
    pytest.importorskip("pypdfium2")
    monkeypatch.setattr(sys, "stdin", Input(sample.pdf([["Text"]])))
    assert read(Source("-", None)).kind == "pdf"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (source,) = find([pipe]).sources
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"through a pipe"))
    writer.start()
    assert read(source).text == "through a pipe"
    writer.join()


# ---------------------------------------------------------------------------------------------
# Finding


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.md", "a.txt", "sub/z.html", "sub/deep/y.py", "other/x.pdf", "LICENSE"):
        written(tmp_path, f"docs/{name}", "text")
    return tmp_path / "docs"


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """As a user whom permissions hold for, also where the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def names(*paths: str | Path) -> list[str]:
    found = find(paths)
    assert found.problems == ()
    return [source.name.replace(os.sep, "/") for source in found.sources]


ALL = ["LICENSE", "a.txt", "b.md", "other/x.pdf", "sub/z.html", "sub/deep/y.py"]


def test_a_folder(folder, monkeypatch):
    assert names("docs") == [f"docs/{name}" for name in ALL]
    assert names("docs/") == names("docs") == names("./docs")
    assert find(["docs"]).notes == ()
    monkeypatch.chdir(folder)
    assert names(".") == ALL


def test_files_in_the_order_given_and_once(folder):
    (folder / "link.md").symlink_to("b.md")
    given = ["docs/b.md", "docs/link.md", folder / "a.txt", "docs", "docs/sub/../b.md"]
    assert names(*given)[:2] == ["docs/b.md", str(folder / "a.txt")]
    assert len(names(*given)) == len(ALL)


def test_patterns_that_no_shell_expanded(folder, monkeypatch):
    assert names("docs/*.md") == ["docs/b.md"]
    assert names("docs/**/*.*") == [f"docs/{name}" for name in sorted(ALL) if "." in name]
    assert names("docs/s*") == ["docs/sub/z.html", "docs/sub/deep/y.py"]
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert names("~/*.md") == [str(folder / "b.md")]
    assert names("~/a.txt") == [str(folder / "a.txt")]
    written(folder, "odd[1].txt", "text")
    assert names("docs/odd[1].txt") == ["docs/odd[1].txt"]


def test_what_a_folder_holds_beside_documents(folder):
    for name, content in {
        ".hidden.txt": "text", ".git/config.txt": "text", "~$a.docx": "lock",
        "p.png": b"\x89PNG\x00", "q.PNG": b"\x89PNG\x00", "out.jsonl": "{}", "empty.py": "",
        "program": b"\x7fELF\x00",
    }.items():  # fmt: skip
        written(folder, name, content)
    assert names("docs") == [f"docs/{name}" for name in ALL]
    assert find(["docs"]).notes == (
        "left out in docs: 3 hidden, 2 .png, 1 empty, 1 .jsonl, 1 without an ending",
    )
    assert names("docs/.hidden.txt", "docs/out.jsonl") == ["docs/.hidden.txt", "docs/out.jsonl"]


def test_an_empty_document_is_not_left_out(folder):
    written(folder, "empty.txt", "")
    assert "docs/empty.txt" in names("docs")


@pytest.mark.skipif(os.name == "nt", reason="no such names there")
def test_each_path_has_a_name_of_its_own(folder):
    odd = [b"x\ny", b"x\ty", rb"x\ny", b"x\xff", b"x\xfe", rb"x\xff", "x\x85".encode(), b"x\x85"]
    odd += ["x\u202ey".encode(), "x\u202fy 👩\u200d🚀".encode()]
    for name in odd:
        try:
            (folder / "odd").mkdir(exist_ok=True)
            Path(os.fsdecode(os.fsencode(folder) + b"/odd/" + name)).write_text("text")
        except OSError:
            pytest.skip("this file system takes no such names")
    found = names("docs/odd")
    assert len(set(found)) == len(odd)
    for name in found:
        name.encode()
        assert "\n" not in name
    assert {r"docs/odd/x\ny", r"docs/odd/x\\ny", r"docs/odd/x\xff", r"docs/odd/x\u0085"} < set(
        found
    )
    assert "docs/odd/x\u202fy 👩\u200d🚀" in found


def test_outputs_are_no_inputs(folder):
    written(folder, "out.txt", "{}")
    output = os.stat("docs/out.txt")
    for path in ("docs", "docs/out.txt", "docs/o*"):
        found = find([path, "docs/a.txt"], outputs=[output])
        assert "docs/out.txt" not in [source.name for source in found.sources]
        assert "docs/a.txt" in [source.name for source in found.sources]
        assert found.notes == (
            f"left out: {os.path.join('docs', 'out.txt')}, where the records go",
        )
        assert found.problems == ()


def test_what_is_wrong_twice_is_said_once(folder):
    assert len(find(["gone", "gone", "docs/*.no", "docs/*.no"]).problems) == 2


def test_links_in_circles(folder):
    (folder / "sub" / "up").symlink_to(folder)
    (folder / "self").symlink_to("self")
    (folder / "nowhere.txt").symlink_to("gone.txt")
    assert names("docs") == [f"docs/{name}" for name in ALL]
    assert find(["docs"]).notes == ("left out in docs: 2 not a file",)
    found = find(["docs/self", "docs/nowhere.txt", "docs/a.txt"])
    assert [source.name for source in found.sources] == ["docs/a.txt"]
    assert [name for name, _ in found.problems] == ["docs/self", "docs/nowhere.txt"]
    assert "leads nowhere" in found.problems[1][1]


def test_what_is_not_there_is_a_problem_and_the_rest_goes_on(folder):
    (folder.parent / "void").mkdir()
    found = find(["gone.txt", "docs/*.xyz", "docs/a.txt", "void", "a\0b", "docs/a.txt/x", ""])
    assert [source.name for source in found.sources] == ["docs/a.txt"]
    assert found.problems == (
        ("gone.txt", "gone.txt does not exist"),
        ("docs/*.xyz", "no file matches docs/*.xyz"),
        ("void", "void holds no document"),
        (r"a\x00b", r"cannot read a\x00b: embedded null byte"),
        ("docs/a.txt/x", "cannot read docs/a.txt/x: Not a directory"),
        ('""', '"" does not exist'),
    )
    if os.path.exists("/dev/null"):
        assert "neither" in find(["/dev/null"]).problems[0][1]


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="such names cannot exist here")
def test_names_that_cannot_be_shown(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\nb.txt")
    Path(path).write_text("text")
    (source,) = find([path]).sources
    source.name.encode()
    assert source.name.endswith(r"a\xff\nb.txt")
    assert read(source).text == "text"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no such permissions here")
def test_without_permission(folder):
    for path in (folder.parent, folder, folder / "other"):
        path.chmod(0o755)
    (folder / "a.txt").chmod(0)
    (folder / "sub").chmod(0)
    with nobody():
        found = find(["docs"])
        assert found.problems == (("docs/sub", "cannot read docs/sub: Permission denied"),)
        assert [s.name for s in found.sources] == [f"docs/{name}" for name in ALL[:4]]
        with pytest.raises(DocumentError, match="cannot read docs/a.txt: Permission denied"):
            read(found.sources[1])
    (folder / "sub").chmod(0o755)


# ---------------------------------------------------------------------------------------------
# Without the extra


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.html", b"<p>text</p>", "HTML"),
        ("a.pdf", sample.pdf([["Text"]]), "PDF"),
        ("a.docx", sample.docx(sample.paragraph("Text")), "Word"),
        ("a.epub", sample.epub({"a.xhtml": "Text"}), "EPUB"),
        ("a.txt", GERMAN.encode("cp1252"), "text that is not UTF-8"),
    ],
)
def test_without_the_extra_the_command_that_installs_it(refused, monkeypatch, name, content, what):
    for library in ("pypdfium2", "mammoth", "markdownify", "bs4", "chardet"):
        monkeypatch.setitem(sys.modules, library, None)
    assert refused(name, content) == (
        f"{name}: reading {what} takes more libraries: pip install 'knapspec-edge[documents]'"
    )


def test_plain_text_needs_no_extra_and_imports_none(tmp_path):
    path = written(tmp_path, "a.md", GERMAN)
    code = (
        "import sys\n"
        "from knapspec_edge.text.documents import find, read\n"
        f"document = read(find([{str(path)!r}]).sources[0])\n"
        "print(sorted(set(sys.modules) & {'pypdfium2', 'mammoth', 'markdownify', 'bs4',\n"
        "    'chardet', 'numpy', 'llama_cpp'}), len(document.text))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[]", str(len(GERMAN))], result.stderr
