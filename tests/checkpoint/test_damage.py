"""Whatever happens to a checkpoint's bytes is found, named, and costs no more than that checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from buoy.checkpoint.manifest import SCHEMA, seal
from buoy.checkpoint.store import DamagedCheckpoint, NewerCheckpoint, Store
from tests.checkpoint.ground import ROOT, contents, save, state

WHILE_LOADED = "it changed while it was being loaded"
FILES = ("state.safetensors", "values.json", "manifest.json")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint to be copied and hurt."""
    return Path(save(tmp_path_factory.mktemp("pristine"), 4, size=400).folder)


@pytest.fixture
def hurt(pristine: Path, tmp_path: Path) -> Path:
    """A copy of it in a run folder of its own."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints" / pristine.name))


def complaint(folder: Path) -> DamagedCheckpoint:
    store = Store(folder.parent.parent)
    with pytest.raises(DamagedCheckpoint) as found:
        contents(store.open(store.list()[0]))
    return found.value


def reseal(folder: Path, **changes: object) -> None:
    """Forge a manifest whose own checksum is right."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    del fields["crc32"]
    (folder / "manifest.json").write_bytes(seal({**fields, **changes}))


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(hurt: Path, name: str) -> None:
    """A sample; `make kills` tries many more."""
    good = (hurt / name).read_bytes()
    chance = random.Random(1)
    for _ in range(300):
        bit = chance.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (hurt / name).write_bytes(bad)

        assert complaint(hurt).file == name, f"bit {bit} of {name}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_grown_is_found(hurt: Path, name: str) -> None:
    good = (hurt / name).read_bytes()
    for length in [*range(0, len(good), 41), len(good) - 1]:
        (hurt / name).write_bytes(good[:length])

        assert complaint(hurt).file == name, f"{name} of {length} bytes"
    (hurt / name).write_bytes(good + b" ")
    assert complaint(hurt).file == name


def test_the_damaged_tensor_is_named(hurt: Path) -> None:
    header = json.loads((hurt / "state.safetensors").read_bytes()[8:4096])
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        if start == end:
            continue
        good = (hurt / "state.safetensors").read_bytes()
        bad = bytearray(good)
        bad[4096 + start] ^= 1
        (hurt / "state.safetensors").write_bytes(bad)

        found = complaint(hurt)
        assert found.tensor == name and name in str(found)
        (hurt / "state.safetensors").write_bytes(good)


def test_a_damaged_header_is_named_as_such(hurt: Path) -> None:
    data = bytearray((hurt / "state.safetensors").read_bytes())
    data[3000] ^= 1  # in the padding, where no other reader would look
    (hurt / "state.safetensors").write_bytes(data)

    assert complaint(hurt).tensor == "header"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_a_link_and_a_pipe_are_not_read(hurt: Path, name: str) -> None:
    outside = hurt.parents[1] / "outside"
    (hurt / name).rename(outside)
    assert "it is missing" in complaint(hurt).what

    (hurt / name).symlink_to(outside)
    assert "link" in complaint(hurt).what

    (hurt / name).unlink()
    os.mkfifo(hurt / name)
    assert "not a plain file" in complaint(hurt).what


def test_a_link_in_place_of_the_folder_is_not_followed(hurt: Path) -> None:
    hurt.rename(hurt.parents[1] / "outside")
    hurt.symlink_to(hurt.parents[1] / "outside")

    assert complaint(hurt).file == "."


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", "sub/values.json", ".."])
def test_a_manifest_cannot_lead_out_of_its_folder(hurt: Path, path: str) -> None:
    files = json.loads((hurt / "manifest.json").read_bytes())["files"]
    files[path] = files.pop("values.json")
    reseal(hurt, files=files)

    assert complaint(hurt).tensor == "files"


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"about": []},
        {"about": {"$": "tensor", "v": "model/bias"}},
        {"files": None},
        {"files": {"state.safetensors": {}, "values.json": {}}},
        {"files": {"state.safetensors": {"size": 1 << 60, "pieces": [[1 << 60, 0]]},
                   "values.json": {"size": 0, "pieces": []}}},
        {"files": {"state.safetensors": {"size": 0, "pieces": [[-1, 0], [1, 0]]},
                   "values.json": {"size": 0, "pieces": []}}},
        {"files": {"state.safetensors": {"size": 0, "pieces": []}, "values.json": {"size": 0, "pieces": []}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_is_refused(hurt: Path, change: dict[str, object]) -> None:
    reseal(hurt, **change)

    complaint(hurt)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [1 << 50, (1 << 50) + 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        [],
    ],
    ids=str,
)
def test_a_forged_header_is_refused(hurt: Path, entry: object) -> None:
    """Checksums are no signature: what they let through is still not believed."""
    import zlib

    text = json.dumps({"model/bias": entry}).encode().ljust(4088)
    data = len(text).to_bytes(8, "little") + text + bytes(64)
    (hurt / "state.safetensors").write_bytes(data)
    files = json.loads((hurt / "manifest.json").read_bytes())["files"]
    files["state.safetensors"] = {"size": len(data), "pieces": [[len(data), zlib.crc32(data)]]}
    reseal(hurt, files=files)

    assert complaint(hurt).tensor == "model/bias"


def test_a_manifest_of_a_gigabyte_is_refused_unread(hurt: Path) -> None:
    os.truncate(hurt / "manifest.json", 1 << 30)
    tracemalloc.start()
    try:
        assert "too many" in complaint(hurt).what
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_newer_format_is_refused_in_words(hurt: Path) -> None:
    reseal(hurt, schema="buoy.checkpoint/2")
    store = Store(hurt.parents[1])

    with pytest.raises(NewerCheckpoint, match=re.escape(SCHEMA)):
        store.newest(pytest.fail)


def test_nested_beyond_reason_is_damage_and_no_crash(hurt: Path) -> None:
    import zlib

    data = b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (hurt / "values.json").write_bytes(data)
    files = json.loads((hurt / "manifest.json").read_bytes())["files"]
    files["values.json"] = {"size": len(data), "pieces": [[len(data), zlib.crc32(data)]]}
    reseal(hurt, files=files)

    assert complaint(hurt).file == "values.json"


def test_the_newest_good_one_is_used_and_the_damaged_ones_are_named_and_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    three, two, _ = (Path(entry.folder) for entry in Store(tmp_path).list())
    os.truncate(three / "state.safetensors", 10_000)
    (two / "values.json").write_bytes(b"{}")
    heard: list[str] = []

    found = Store(tmp_path).newest(heard.append)

    assert found is not None and contents(found) == state(1)
    assert [str(three) in heard[0], str(two) in heard[1], len(heard)] == [True, True, 2]
    assert "model/embed.weight" in heard[0] and "values.json" in heard[1]
    assert three.exists() and two.exists()


def test_a_handed_out_tensor_may_be_written_to_without_touching_the_file(pristine: Path) -> None:
    store = Store(pristine.parents[1])
    opened = store.open(store.list()[0])
    before = (pristine / "state.safetensors").read_bytes()

    opened.tensors["model/bias"].read()[:] = bytes(301)

    assert (pristine / "state.safetensors").read_bytes() == before


def flip_its_last_bit(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("change", [flip_its_last_bit, lambda path: os.truncate(path, 5000)])
def test_what_changes_after_it_was_verified_is_not_handed_out(
    hurt: Path, change: Callable[[Path], None]
) -> None:
    """A drive's client that syncs: the bytes would be loaded without a word, a file cut short be a SIGBUS."""
    store = Store(hurt.parents[1])
    opened = store.open(store.list()[0])
    change(hurt / "state.safetensors")
    child = os.fork()
    if child == 0:  # in a process of its own, which a SIGBUS may end
        try:
            contents(opened)
            os._exit(1)
        except DamagedCheckpoint as error:
            os._exit(0 if (error.file, error.what) == ("state.safetensors", WHILE_LOADED) else 2)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def test_what_is_removed_meanwhile_is_handed_out_all_the_same(hurt: Path) -> None:
    store = Store(hurt.parents[1])
    opened = store.open(store.list()[0])
    shutil.rmtree(hurt)

    assert contents(opened) == state(4, 400)


@pytest.mark.parametrize(
    ("at", "pieces"), [(1, 2), (2, 2)], ids=["the end of the header", "the end of a tensor"]
)
def test_a_tensor_that_does_not_begin_a_piece_of_its_own_is_refused(hurt: Path, at: int, pieces: int) -> None:
    """It could not be verified by itself."""
    import zlib

    data = (hurt / "state.safetensors").read_bytes()
    files = json.loads((hurt / "manifest.json").read_bytes())["files"]
    lengths = [length for length, _ in files["state.safetensors"]["pieces"]]
    lengths[at - 1 : at + pieces - 1] = [sum(lengths[at - 1 : at + pieces - 1])]
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    spans = itertools.pairwise(ends)
    files["state.safetensors"]["pieces"] = [
        [end - start, zlib.crc32(data[start:end])] for start, end in spans
    ]
    reseal(hurt, files=files)

    assert complaint(hurt).what == "the tensor's offsets do not match its checksums"


def test_the_reader_of_the_documentation_works_and_finds_damage(pristine: Path, hurt: Path) -> None:
    page = (ROOT / "docs" / "checkpoint-format.md").read_text()
    scope: dict[str, object] = {}
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0].replace('"np"', '"pt"')  # bfloat16 is in it
    exec(code, scope)
    read = scope["read"]

    values, tensors = read(str(pristine))  # type: ignore[operator]
    data = bytearray((hurt / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (hurt / "state.safetensors").write_bytes(data)

    assert values["step"] == 4 and len(code.strip().splitlines()) <= 11
    assert bytes(tensors["model/bias"].numpy()) == bytes(state(4, 400)["model"]["bias"].data)  # type: ignore[index]
    with pytest.raises(AssertionError, match=r"state\.safetensors is damaged"):
        read(str(hurt))  # type: ignore[operator]
