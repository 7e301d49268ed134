"""The second home in an object store: moto's S3, spoken to over real HTTP by the mirror's own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from buoy.checkpoint.mirror.mirror import Mirror
from buoy.checkpoint.mirror.storage import UrlStorage, survey
from buoy.checkpoint.retention import Keep
from buoy.checkpoint.store import Store
from tests.processes import buoy, wait_until

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

HEAD = """
import sys
from buoy.checkpoint.mirror.mirror import Mirror
from tests.training.loop import *
Mirror.retry_seconds, Mirror.patience = 0.2, 30.0
"""
PLAIN = "train(sys.argv[1], mirror=sys.argv[2], steps=45, save=10, keep=2, size=30_000, pause=0.02)"
BIG = "train(sys.argv[1], mirror=sys.argv[2], steps=2, size=2_500_000, pause=0)"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    host, port = store.get_host_and_port()
    yield f"http://{host}:{port}"
    store.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty bucket, and the environment that leads to it."""
    import s3fs  # type: ignore[import-untyped]

    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name))}"
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}/runs"


def train(folder: Path, mirror: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code, str(folder), mirror]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def there(folder: Path, mirror: str) -> list[int]:
    return [copy.step for copy in survey(UrlStorage(mirror, folder.name))[0]]


def test_checkpoints_go_to_the_store_are_kept_there_by_the_same_rule_and_come_back(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = train(tmp_path / "run", bucket, PLAIN)
    assert done.stdout.endswith("finished\n") and f"step 45 is safe in the mirror {bucket}" in done.stderr, (
        done.stderr
    )
    wait_until(lambda: there(tmp_path / "run", bucket) == [45, 40], "retention in the store")

    from s3fs import S3FileSystem

    verdict = (
        f"{bucket}/run/attempts/0001/verdict.json"  # one argument for the checkpoints and the flight log
    )
    wait_until(lambda: S3FileSystem(use_listings_cache=False).exists(verdict), "the verdict in the store")
    listed = buoy("ckpt", "list", str(tmp_path / "run"))
    assert "step 45 safe in the mirror" in listed.stdout and listed.stdout.count("yes") == 2
    restored = buoy("ckpt", "restore", f"{bucket}/run", "--to", str(tmp_path / "new" / "run"))
    assert restored.returncode == 0 and "step 45 is in" in restored.stdout, restored.stderr
    found = Store(str(tmp_path / "new" / "run")).newest(pytest.fail)
    assert found is not None and found.step == 45

    # A store that cannot be asked is an error only where nothing is here to go on from.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    resumed = train(tmp_path / "run", bucket, PLAIN.replace("45", "50"))
    anew = train(tmp_path / "other" / "run", bucket, PLAIN)

    assert resumed.stdout.startswith("from 45\n") and "the mirror cannot be read" in resumed.stderr
    assert resumed.stdout.endswith("finished\n")
    assert "MirrorFailed: the mirror cannot be read" in anew.stderr and "step 1" not in anew.stdout


def test_a_large_file_goes_in_parts_and_comes_back_whole(tmp_path: Path, bucket: str) -> None:
    """19 MiB are more than one part of a multipart upload, whose ETag is no checksum of the whole."""
    done = train(tmp_path / "run", bucket, BIG)
    assert f"step 2 is safe in the mirror {bucket}" in done.stderr, done.stderr

    again = Mirror(str(tmp_path / "new"), bucket, Keep(), "run")
    assert again.bring_back(None, lambda text: None) == 2
    found = Store(str(tmp_path / "new")).newest(pytest.fail)
    assert found is not None and found.step == 2


def test_a_store_that_alters_bytes_is_caught_by_its_checksum(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "file"
    source.write_bytes(os.urandom(1 << 20))
    pieces = [(1 << 20, crc32(source.read_bytes()))]
    home = UrlStorage(bucket, "run")
    honest = home._fs.info
    where = (str(source), "step-000000001", "state.safetensors", pieces)
    home.put(*where, lambda count: None)

    def altered(path: str, **options: Any) -> Any:
        home._fs.pipe_file(path, bytes([source.read_bytes()[0] ^ 1]) + source.read_bytes()[1:])
        return honest(path, **options)

    monkeypatch.setattr(home._fs, "info", altered)
    with pytest.raises(OSError, match="different checksum"):
        home.put(str(source), "step-000000001", "state.safetensors", pieces, lambda count: None)


def test_a_copy_that_is_given_up_leaves_no_file(tmp_path: Path, bucket: str) -> None:
    source = tmp_path / "file"
    source.write_bytes(bytes(1 << 20))
    home = UrlStorage(bucket, "run")

    def full(count: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        home.put(str(source), "step-000000001", "state.safetensors", [(1 << 20, crc32(bytes(1 << 20)))], full)
    assert home.sizes() == {}


def test_a_store_that_refuses_costs_a_warning_and_nothing_else(tmp_path: Path, bucket: str) -> None:
    done = train(tmp_path / "run", "s3://no-such-bucket-of-ours/runs", PLAIN)

    assert done.stdout.endswith("finished\n"), done.stderr
    assert "step 45 is not yet in the mirror s3://no-such-bucket-of-ours/runs (" in done.stderr
    assert [entry.step for entry in Store(str(tmp_path / "run")).list()] == [45, 40]
