"""scripts/patches.py: the strict applier, the guards around it, and the messages."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("patches", ROOT / "scripts" / "patches.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["patches"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


patches = _load()
PatchError = patches.PatchError

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

HEADER = """Greet more warmly

Kind: deliberate difference
Upstream: not sent, because it is ours
Effective if: the greeting test passes
Delete when: upstream greets
  on its own
"""

SOURCE = b"".join(b"line %d\n" % i for i in range(1, 21))


def unified(old: bytes, new: bytes, path: str = "src/a.c", context: int = 3) -> bytes:
    """The naive twin: a unified diff by difflib, with git's marks for a missing last newline."""
    out = [b"diff --git a/%s b/%s\n" % (path.encode(), path.encode())]
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        _keepends(old),
        _keepends(new),
        b"a/" + path.encode(),
        b"b/" + path.encode(),
        n=context,
    )
    for line in lines:
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


def _keepends(content: bytes) -> list[bytes]:
    return [line for line in re.split(rb"(?<=\n)", content) if line]


def parsed(diff: bytes, name: str = "a.patch"):
    return patches.parse_patch(name, HEADER.encode() + b"\n" + diff)


def applied(diff: bytes, content: bytes | None, **more):
    (change,) = parsed(diff).files
    return patches.apply_hunks("a.patch", change, content, **more)


# ---------------------------------------------------------------------------------------------
# The applier

lines = st.lists(st.sampled_from([b"a", b"b", b"", b"  c", b"-d", b"+e", b"@@", b"--- f", b"g\r"]))


@given(
    old=lines, new=lines, old_end=st.booleans(), new_end=st.booleans(), context=st.integers(0, 4)
)
def test_applying_a_difflib_diff_gives_the_new_content(old, new, old_end, new_end, context):
    before = b"\n".join(old) + (b"\n" if old_end else b"")
    after = b"\n".join(new) + (b"\n" if new_end else b"")
    if before == after or not before or not after:
        return
    assert applied(unified(before, after, context=context), before) == after


def test_several_hunks_in_one_file():
    new = SOURCE.replace(b"line 2\n", b"").replace(b"line 18\n", b"line 18\nmore\n")
    diff = unified(SOURCE, new)
    assert diff.count(b"\n@@ ") == 2
    assert applied(diff, SOURCE) == new


def test_a_changed_context_line_is_refused_with_file_hunk_and_both_lines():
    diff = unified(SOURCE, SOURCE.replace(b"line 15\n", b"line 15\nmore\n"))
    with pytest.raises(PatchError) as caught:
        applied(diff, SOURCE.replace(b"line 13\n", b"line 13!\n"))
    message = str(caught.value)
    assert "a.patch does not apply to src/a.c: hunk 1 of 1" in message
    assert "line 13 expected: line 13\\n" in message
    assert "line 13 found:    line 13!\\n" in message


def test_a_moved_hunk_is_refused_and_its_place_named():
    diff = unified(SOURCE, SOURCE.replace(b"line 15\n", b"line 15\nmore\n"))
    with pytest.raises(PatchError, match=r"its lines are at line 14, not at line 13"):
        applied(diff, b"two\nnew\n" + SOURCE.replace(b"line 1\n", b""))


def test_a_moved_hunk_is_taken_where_offsets_are_allowed():
    offsets: list[int] = []
    diff = unified(SOURCE, SOURCE.replace(b"line 15\n", b"line 15\nmore\n"))
    result = applied(diff, b"new\n" + SOURCE, offsets=offsets)
    assert result == b"new\n" + SOURCE.replace(b"line 15\n", b"line 15\nmore\n")
    assert offsets == [1]


def test_a_moved_hunk_with_two_possible_places_is_refused_even_then():
    old = b"x\nsame\nsame\n"
    diff = unified(b"same\n", b"same\nmore\n")
    with pytest.raises(PatchError, match="does not apply"):
        applied(diff, old, offsets=[])


def test_a_line_end_is_part_of_a_line():
    diff = unified(SOURCE, SOURCE.replace(b"line 15\n", b"line 15\nmore\n"))
    with pytest.raises(PatchError, match="differ in their line end only"):
        applied(diff, SOURCE.replace(b"\n", b"\r\n"))


def test_sources_with_windows_line_ends_keep_them():
    old = SOURCE.replace(b"\n", b"\r\n")
    new = old.replace(b"line 15\r\n", b"line 15\r\nmore\r\n")
    assert applied(unified(old, new), old) == new


def test_a_patch_file_converted_on_checkout_is_explained():
    diff = unified(SOURCE, SOURCE + b"more\n").replace(b"\n", b"\r\n")
    with pytest.raises(PatchError, match="core.autocrlf"):
        parsed(diff)


def test_no_newline_at_the_end_of_either_side():
    assert applied(unified(b"a\nb", b"a\nb\n"), b"a\nb") == b"a\nb\n"
    assert applied(unified(b"a\nb\n", b"a\nb"), b"a\nb\n") == b"a\nb"
    with pytest.raises(PatchError, match="line end only"):
        applied(unified(b"a\nb", b"a\nc"), b"a\nb\n")


def test_context_past_the_end_of_the_file():
    diff = unified(SOURCE, SOURCE + b"more\n")
    with pytest.raises(PatchError, match="line 20 is past the end of the file"):
        applied(diff, SOURCE.replace(b"line 20\n", b""))


NEW_FILE = (
    b"diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1,2 @@\n+a\n+b\n"
)
DELETED = (
    b"diff --git a/n b/n\ndeleted file mode 100644\n--- a/n\n+++ /dev/null\n"
    b"@@ -1,2 +0,0 @@\n-a\n-b\n"
)


def test_new_and_deleted_files():
    assert applied(NEW_FILE, None) == b"a\nb\n"
    assert applied(DELETED, b"a\nb\n") is None
    with pytest.raises(PatchError, match="exists already"):
        applied(NEW_FILE, b"")
    with pytest.raises(PatchError, match="no such file"):
        applied(DELETED, None)
    with pytest.raises(PatchError, match="1 lines would remain"):
        applied(DELETED, b"a\nb\nc\n")


def test_a_stripped_blank_context_line_is_accepted():
    old = b"a\n\nb\n"
    diff = unified(old, b"a\n\nb\nc\n").replace(b"\n \n", b"\n\n")
    assert applied(diff, old) == b"a\n\nb\nc\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((b"+more\n", b""), "shorter than its header"),
        ((b"+more\n", b"+more\n+more\n"), "longer than its header"),
        ((b"@@ -", b"@@ ?"), "not a hunk header"),
        ((b"+++ b/src/a.c", b"+++ b/src/b.c"), "renames are not supported"),
        ((b"--- a/src/a.c", b"--- a/../a.c"), "leaves the source tree"),
        ((b"--- a/src/a.c\n", b"rename from x\n--- a/src/a.c\n"), "renames are not supported"),
        ((b"--- a/src/a.c\n", b"GIT binary patch\n--- a/src/a.c\n"), "binary changes are not"),
    ],
)
def test_malformed_patches_are_named_with_their_line(change, message):
    diff = unified(SOURCE, SOURCE + b"more\n")
    assert change[0] in diff
    with pytest.raises(PatchError, match=message) as caught:
        parsed(diff.replace(*change, 1))
    assert str(caught.value).startswith("a.patch")


def test_a_patch_without_a_change_is_refused():
    with pytest.raises(PatchError, match="holds no change"):
        parsed(b"")


def test_header_fields_continue_on_indented_lines():
    patch = parsed(unified(SOURCE, SOURCE + b"more\n"))
    assert patch.field_of("Delete when") == "upstream greets on its own"
    assert patch.field_of("Kind") == "deliberate difference"
    assert patch.field_of("Removed lines") is None
    assert (patch.added, patch.removed) == (1, 0)


# ---------------------------------------------------------------------------------------------
# A small project around it


class Project:
    """A patches folder and a source archive like that of the bindings, but tiny."""

    commit = "0123456789" * 4

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "patches"
        self.tree = folder / "work" / "llama.cpp"
        self.archive = folder / "llama_cpp_python-9.9.9.tar.gz"
        (self.folder / "overlay").mkdir(parents=True)
        self.overlay = self.folder / "overlay" / "knapspec.h"
        self.overlay.write_text("#define KNAPSPEC_ABI 7\n")
        self.files = {
            "CMakeLists.txt": b"project(x)\n",
            "LICENSE": b"MIT\n",
            "src/a.c": SOURCE,
            "src/b.c": b"b\n",
        }
        self.pack()
        self.patch("greet.patch", unified(SOURCE, SOURCE.replace(b"line 9\n", b"line 9\nhello\n")))
        (self.folder / "series").write_text("# order matters\ngreet.patch\n")
        marks = f"{patches.LEDGER_START}\n{patches.LEDGER_END}"
        (self.folder / "README.md").write_text(f"before\n{marks}\nafter\n")
        patches.write_ledger(self.folder)

    def pack(self, commit: str | None = None) -> None:
        root = "llama_cpp_python-9.9.9"
        members = {f"{root}/vendor/llama.cpp/{path}": data for path, data in self.files.items()}
        members[f"{root}/vendor/llama.cpp/tools/big.cpp"] = b"not kept\n"
        members[f"{root}/.git/modules/vendor/llama.cpp/HEAD"] = (commit or self.commit).encode()
        with tarfile.open(self.archive, "w:gz") as tar:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        digest = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        (self.folder / "UPSTREAM.toml").write_text(
            f'commit = "{self.commit}"\ntag = ""\nbindings = "9.9.9"\n'
            f'archive = "{self.archive.name}"\nsha256 = "{digest}"\n'
            'folder = "vendor/llama.cpp"\nabi = 7\n'
        )

    def patch(self, name: str, diff: bytes, header: str = HEADER) -> None:
        (self.folder / name).write_bytes(header.encode() + b"\n" + diff)

    def problems(self) -> list[str]:
        upstream = patches.read_upstream(self.folder / "UPSTREAM.toml")
        return patches.problems_of_series(self.folder, upstream)

    def prepare(self, **more):
        return patches.prepare(self.tree, patches=self.folder, say=lambda _: None, **more)

    def run(self, *arguments: str) -> int:
        return patches.main(["--patches", str(self.folder), *arguments])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path)
    monkeypatch.setenv("KNAPSPEC_EDGE_SDIST", str(made.archive))
    return made


# ---------------------------------------------------------------------------------------------
# Series and ledger


def test_a_tidy_project_has_no_problem(project):
    assert project.problems() == []


def test_the_ledger_names_what_is_missing_or_does_not_exist(project):
    project.patch("second.patch", unified(b"b\n", b"b\nc\n", "src/b.c"))
    (project.folder / "series").write_text("greet.patch\nsecond.patch\n")
    assert any("second.patch is missing" in text for text in project.problems())
    patches.write_ledger(project.folder)
    assert project.problems() == []
    (project.folder / "series").write_text("second.patch\ngreet.patch\n")
    assert any("order or cells differ" in text for text in project.problems())
    (project.folder / "series").write_text("greet.patch\n")
    problems = project.problems()
    assert any("second.patch is listed but not in series" in text for text in problems)
    assert any("series does not name it" in text for text in problems)


def test_prose_around_the_ledger_stays(project):
    text = (project.folder / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `greet.patch` | Greet more warmly | deliberate difference |" in text


def test_series_must_name_existing_files_once(project):
    (project.folder / "series").write_text("gone.patch\n")
    with pytest.raises(PatchError, match=r"names gone\.patch, but there is no such file"):
        project.problems()
    (project.folder / "series").write_text("greet.patch\ngreet.patch\n")
    with pytest.raises(PatchError, match="listed twice"):
        project.problems()


def test_removed_lines_must_be_allowed_by_the_header(project):
    diff = unified(SOURCE, SOURCE.replace(b"line 9\n", b""))
    project.patch("greet.patch", diff)
    assert any("removes 1 lines, its header allows 0" in text for text in project.problems())
    project.patch("greet.patch", diff, HEADER + "Removed lines: 1\n")
    assert project.problems() == []
    project.patch("greet.patch", diff, HEADER + "Removed lines: 2\n")
    assert any("its header allows 2" in text for text in project.problems())


def test_header_fields_are_required_and_kinds_are_known(project):
    content = (project.folder / "greet.patch").read_bytes()
    (project.folder / "greet.patch").write_bytes(content.replace(b"Upstream:", b"Upstreem:"))
    assert any("no line `Upstream: ...`" in text for text in project.problems())
    (project.folder / "greet.patch").write_bytes(content.replace(b"deliberate", b"accidental"))
    assert any("Kind must be one of" in text for text in project.problems())


def test_the_interface_number_of_pin_and_overlay_must_agree(project):
    project.overlay.write_text("#define KNAPSPEC_ABI 8\n")
    assert any("abi = 7, overlay/knapspec.h says 8" in text for text in project.problems())


def test_the_digest_sees_order_names_and_contents(project):
    project.patch("second.patch", unified(b"b\n", b"b\nc\n", "src/b.c"))
    (project.folder / "series").write_text("greet.patch\nsecond.patch\n")
    first = patches.patch_digest(project.folder)
    (project.folder / "series").write_text("second.patch\ngreet.patch\n")
    swapped = patches.patch_digest(project.folder)
    (project.folder / "series").write_text(
        "# a comment\nsecond.patch # and another\n\ngreet.patch\n"
    )
    assert patches.patch_digest(project.folder) == swapped
    project.overlay.write_text("#define KNAPSPEC_ABI 7 // edited\n")
    edited = patches.patch_digest(project.folder)
    project.overlay.rename(project.overlay.with_name("renamed.h"))
    renamed = patches.patch_digest(project.folder)
    assert len({first, swapped, edited, renamed}) == 4


# ---------------------------------------------------------------------------------------------
# The pin and the archive


def test_the_pin_reads_like_any_toml():
    tomllib = pytest.importorskip("tomllib")
    path = ROOT / "patches" / "UPSTREAM.toml"
    assert patches.read_upstream(path).__dict__ == tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('tag = ""', ""), "tag is missing"),
        (('tag = ""', "tag = []"), r"UPSTREAM\.toml:2: expected"),
        (('tag = ""', 'tag = ""\nextra = 1'), "extra is not a key"),
        (("0123456789" * 4, "0123456"), "full 40 hexadecimal digits"),
    ],
)
def test_a_malformed_pin_is_refused(project, change, message):
    path = project.folder / "UPSTREAM.toml"
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(PatchError, match=message):
        patches.read_upstream(path)


def test_a_wrong_archive_is_refused_with_both_digests(project, capsys):
    project.archive.write_bytes(project.archive.read_bytes() + b"x")
    assert project.run("fetch") == 1
    message = capsys.readouterr().err
    assert "SHA-256 mismatch" in message
    assert message.count("\n  expected ") == 1
    assert message.count("\n  found    ") == 1


def test_an_archive_of_another_commit_is_refused(project, capsys):
    project.pack(commit="f" * 40)
    assert project.run("fetch") == 1
    assert "holds llama.cpp ffff" in capsys.readouterr().err


def test_a_given_archive_that_does_not_exist(project, monkeypatch, capsys):
    monkeypatch.setenv("KNAPSPEC_EDGE_SDIST", "/nowhere/x.tar.gz")
    assert project.run("fetch") == 1
    assert "KNAPSPEC_EDGE_SDIST names /nowhere/x.tar.gz" in capsys.readouterr().err


def test_a_truncated_archive_is_a_message(project):
    project.archive.write_bytes(project.archive.read_bytes()[:60])
    with pytest.raises(PatchError, match="cannot unpack"):
        patches.read_sources(project.archive, "vendor/llama.cpp", None)


def test_the_cache_serves_without_network_and_repairs_itself(project, monkeypatch):
    monkeypatch.delenv("KNAPSPEC_EDGE_SDIST")
    upstream = patches.read_upstream(project.folder / "UPSTREAM.toml")
    calls = []

    def download(requirement, name, target, pinned):
        calls.append(requirement)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(project.archive, target)

    monkeypatch.setattr(patches, "_download", download)
    first = patches.fetch(upstream, lambda _: None)
    assert first.is_relative_to(Path(os.environ["KNAPSPEC_EDGE_CACHE"]))
    assert patches.fetch(upstream, lambda _: None) == first
    assert calls == ["llama-cpp-python==9.9.9"]
    first.write_bytes(b"half a file")
    said: list[str] = []
    patches.fetch(upstream, said.append)
    assert len(calls) == 2
    assert "damaged" in said[0]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "WARNING: Retrying ... Temporary failure in name resolution\n"
            "ERROR: Could not find a version that satisfies the requirement x (from: none)",
            "no network connection",
        ),
        ("/usr/bin/python3: No module named pip", "has no pip"),
        ("ERROR: No matching distribution found for x", "No matching distribution found for x"),
        ("", "pip gave no reason"),
    ],
)
def test_a_failed_download_says_what_to_do(output, expected):
    message = patches._download_failure("llama-cpp-python==9.9.9", output)
    assert expected in message.splitlines()[0]
    assert "KNAPSPEC_EDGE_SDIST" in message


# ---------------------------------------------------------------------------------------------
# Trees for a build


def stamps(tree: Path) -> dict[str, int]:
    return {
        path.relative_to(tree).as_posix(): path.stat().st_mtime_ns
        for path in tree.rglob("*")
        if path.is_file()
    }


def test_prepare_makes_the_patched_tree_and_only_the_kept_parts(project):
    project.prepare()
    assert (project.tree / "src/a.c").read_bytes() == SOURCE.replace(
        b"line 9\n", b"line 9\nhello\n"
    )
    assert set(stamps(project.tree)) == set(project.files)


def test_prepare_pristine_applies_nothing(project):
    assert project.prepare(pristine=True).patches == "pristine"
    assert (project.tree / "src/a.c").read_bytes() == SOURCE


def test_a_second_prepare_writes_nothing_and_needs_no_archive(project):
    project.prepare()
    before = stamps(project.tree)
    project.archive.unlink()
    project.prepare()
    assert stamps(project.tree) == before


def test_a_changed_patch_touches_only_its_files(project):
    project.prepare()
    before = stamps(project.tree)
    os.utime(project.tree / "src/a.c", ns=(1, 1))
    project.patch("greet.patch", unified(SOURCE, SOURCE.replace(b"line 9\n", b"line 9\nbye\n")))
    project.prepare()
    after = stamps(project.tree)
    assert (project.tree / "src/a.c").read_bytes().count(b"bye\n") == 1
    assert after.pop("src/a.c") != 1
    del before["src/a.c"]
    assert after == before


def test_an_edited_tree_is_refused_and_kept(project):
    project.prepare()
    (project.tree / "src/b.c").write_bytes(b"mine\n")
    with pytest.raises(PatchError, match="were edited since they were made"):
        project.prepare()
    assert (project.tree / "src/b.c").read_bytes() == b"mine\n"
    project.prepare(force=True)
    assert (project.tree / "src/b.c").read_bytes() == b"b\n"


def test_a_tree_without_a_stamp_is_repaired(project):
    project.prepare()
    patches.stamp_path(project.tree).unlink()
    (project.tree / "src/b.c").write_bytes(b"half")
    (project.tree / "src/left-over.c").write_bytes(b"")
    project.prepare()
    assert (project.tree / "src/b.c").read_bytes() == b"b\n"
    assert not (project.tree / "src/left-over.c").exists()


def test_a_patch_that_does_not_apply_leaves_the_tree_and_names_the_hunk(project):
    project.prepare()
    before = stamps(project.tree)
    project.patch("greet.patch", unified(b"x\n" + SOURCE, b"x\ny\n" + SOURCE))
    with pytest.raises(PatchError, match=r"greet\.patch does not apply to src/a\.c: hunk 1 of 1"):
        project.prepare()
    assert stamps(project.tree) == before


def test_prepare_tells_cmake_what_it_made(project, tmp_path):
    target = tmp_path / "variables.cmake"
    assert project.run("prepare", str(project.tree), "--cmake-variables", str(target)) == 0
    text = target.read_text()
    assert f'set(KNAPSPEC_EDGE_COMMIT "{project.commit}")' in text
    assert 'set(KNAPSPEC_EDGE_ABI "7")' in text
    assert patches.patch_digest(project.folder) in text


# ---------------------------------------------------------------------------------------------
# The work tree: apply, export, check, drift


def git(tree: Path, *arguments: str) -> str:
    return patches.Git(tree)(*arguments).decode()


@needs_git
def test_export_normalises_once_and_then_changes_nothing(project):
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in project.folder.glob("*") if path.is_file()}

    work = ("--work", str(project.tree))
    assert project.run("apply", *work) == 0
    assert project.run("export", *work) == 0
    before = contents()
    assert project.run("apply", *work) == 0
    assert project.run("export", *work) == 0
    assert contents() == before


@needs_git
def test_apply_gives_the_same_commits_every_time(project, tmp_path):
    heads = []
    for name in ("one", "two"):
        tree = tmp_path / name
        assert project.run("apply", "--work", str(tree)) == 0
        heads.append(patches.read_stamp(tree).head)
    assert heads[0] == heads[1] != ""


@needs_git
def test_export_takes_over_edits_new_commits_and_their_ledger(project, capsys):
    work = ("--work", str(project.tree))
    assert project.run("apply", *work) == 0
    (project.tree / "src/b.c").write_bytes(b"b\nc\n")
    assert project.run("export", *work) == 1
    assert "not committed: src/b.c" in capsys.readouterr().err
    git(project.tree, "commit", "--quiet", "-am", "second.patch\n\n" + HEADER)
    assert project.run("apply", *work) == 1
    assert "commits that are not exported" in capsys.readouterr().err
    assert project.run("export", *work) == 0
    assert (project.folder / "series").read_text() == "# order matters\ngreet.patch\nsecond.patch\n"
    exported = (project.folder / "second.patch").read_text()
    assert exported.startswith("Greet more warmly\n")
    assert "\nindex " not in exported
    assert project.problems() == []
    assert project.run("check", *work) == 0


@needs_git
def test_apply_refuses_a_dirty_tree_until_forced(project, capsys):
    work = ("--work", str(project.tree))
    assert project.run("apply", *work) == 0
    (project.tree / "src/b.c").write_bytes(b"mine\n")
    assert project.run("apply", *work) == 1
    assert "not committed: src/b.c" in capsys.readouterr().err
    assert (project.tree / "src/b.c").read_bytes() == b"mine\n"
    assert project.run("apply", "--force", *work) == 0
    assert (project.tree / "src/b.c").read_bytes() == b"b\n"


@needs_git
def test_an_enclosing_repository_is_never_touched(project, tmp_path, monkeypatch):
    outer = patches.Git(tmp_path)
    outer("init", "--quiet")
    outer.commit_all("outer\n")
    head, config = outer.head(), (tmp_path / ".git/config").read_bytes()
    # even where git was told to look at the outer one
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert project.run("apply", "--work", str(project.tree)) == 0
    assert project.run("export", "--work", str(project.tree)) == 0
    assert outer.head() == head
    assert (tmp_path / ".git/config").read_bytes() == config
    assert (project.tree / ".git").is_dir()


@needs_git
def test_a_failing_patch_leaves_the_tree_before_it_and_says_how_to_go_on(project, capsys):
    project.patch("second.patch", unified(b"x\n", b"x\ny\n", "src/b.c"))
    (project.folder / "series").write_text("greet.patch\nsecond.patch\n")
    assert project.run("apply", "--work", str(project.tree)) == 1
    message = capsys.readouterr().err
    assert "second.patch does not apply to src/b.c: hunk 1 of 1" in message
    assert "run `export`" in message
    assert b"hello" in (project.tree / "src/a.c").read_bytes()


def test_apply_without_git_still_makes_the_tree(project, monkeypatch, capsys):
    monkeypatch.setattr(patches.Git, "available", staticmethod(lambda: False))
    work = ("--work", str(project.tree))
    assert project.run("apply", *work) == 0
    assert b"hello" in (project.tree / "src/a.c").read_bytes()
    assert project.run("export", *work) == 1
    assert "export needs git" in capsys.readouterr().err
    (project.tree / "src/b.c").write_bytes(b"mine\n")
    assert project.run("apply", *work) == 1
    assert "was edited" in capsys.readouterr().err


def test_check_lists_every_problem(project, capsys):
    project.patch("greet.patch", unified(b"x\n" + SOURCE, b"x\ny\n" + SOURCE), "Nothing said\n")
    project.overlay.write_text("#define KNAPSPEC_ABI 8\n")
    assert project.run("check", "--work", str(project.tree)) == 1
    message = capsys.readouterr().err
    for expected in ("no line `Kind: ...`", "knapspec.h says 8", "ledger", "does not apply"):
        assert expected in message


def test_check_sees_a_pin_that_differs_from_the_dependency(project, capsys):
    pyproject = project.folder.parent / "pyproject.toml"
    pyproject.write_text('dependencies = ["llama-cpp-python==9.9.8"]\n')
    assert project.run("check", "--work", str(project.tree)) == 1
    assert "pins llama-cpp-python 9.9.8, UPSTREAM.toml says 9.9.9" in capsys.readouterr().err
    pyproject.write_text('dependencies = ["llama-cpp-python==9.9.9"]\n')
    assert project.run("check", "--work", str(project.tree)) == 0
    loader = project.folder.parent / "knapspec_edge" / "native" / "library.py"
    loader.parent.mkdir(parents=True)
    loader.write_text("ABI = 6\n")
    assert project.run("check", "--work", str(project.tree)) == 1
    assert "library.py has ABI = 6, UPSTREAM.toml says 7" in capsys.readouterr().err


def test_drift_accepts_moved_hunks_and_names_the_patch_that_breaks(project, capsys):
    pin = (project.folder / "UPSTREAM.toml").read_bytes()
    project.files["src/a.c"] = b"new\n" + SOURCE
    project.pack()
    (project.folder / "UPSTREAM.toml").write_bytes(pin)
    arguments = ("drift", "--no-build", "--archive", str(project.archive))
    assert project.run(*arguments) == 0
    assert "greet.patch: applies, 1 hunks moved" in capsys.readouterr().out
    project.files["src/a.c"] = SOURCE.replace(b"line 8\n", b"eight\n")
    project.pack()
    (project.folder / "UPSTREAM.toml").write_bytes(pin)
    assert project.run(*arguments) == 1
    message = capsys.readouterr().err
    assert "greet.patch does not apply to src/a.c" in message
    assert "upstream files: src/a.c" in message
    assert (project.folder / "UPSTREAM.toml").read_bytes() == pin


# ---------------------------------------------------------------------------------------------
# The repository's own patches


def test_our_series_ledger_and_headers_agree():
    upstream = patches.read_upstream()
    assert patches.problems_of_series(patches.PATCHES, upstream) == []
    assert patches.pin_problems(upstream, ROOT) == []


def test_our_patches_stay_small():
    for patch in patches.read_series(patches.PATCHES):
        assert patch.added < 60, patch.name
        assert len(patch.files) <= 3, patch.name


def test_help_names_all_verbs():
    command = [sys.executable, str(ROOT / "scripts" / "patches.py"), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("fetch", "apply", "check", "export", "drift"):
        assert re.search(rf"^    {name} ", text, re.MULTILINE), name
