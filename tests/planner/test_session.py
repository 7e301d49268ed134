"""What a training needs beside the device's memory, and where it can run."""

from __future__ import annotations

import csv
from importlib import resources

import pytest

from buoy.errors import UsageError
from buoy.estimate.devices import all_devices
from buoy.estimate.result import PER_OPERATION, Interval
from buoy.estimate.siblings import all_siblings
from buoy.estimate.trace import Trace
from buoy.planner.result import FITS, NOT, TIGHT, UNKNOWN, Need, worst
from buoy.planner.session import Session, batch_bytes, held, needs
from buoy.planner.targets import target, targets

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture
def trace() -> Trace:
    """Two steps: 1 GiB of weights, 2 GiB of optimizer state, batches of 8 MiB."""
    labels = [("weights", "m", ""), ("optimizer", "m", ""), ("batch", "", ""), ("activations", "m", "")]
    events = [("a", 0, GIB), ("m", 0, 0), ("a", 1, 8 * MIB), ("a", 2, 512), ("f", 2, 0), ("a", 3, 2 * GIB),
              ("m", 1, 0), ("a", 4, 8 * MIB), ("f", 1, 0)]  # fmt: skip
    return Trace(events, labels, {0: 0, 1: 2, 2: 3, 3: 1, 4: 2}, ["step 1", "step 2"])


def named(session: Session, trace: Trace, on: str = "colab-t4", step: float = 2.0) -> dict[str, Need]:
    return {
        need.name: need for need in needs(session, target(on), trace, (step, step), Interval(GIB, GIB, GIB))
    }


def test_a_step_takes_some_time() -> None:
    for given in ("0", "0s", 0):
        with pytest.raises(UsageError, match="takes some time"):
            Session.of({"step_time": given})


def test_a_traces_state_and_batch_are_measured(trace: Trace) -> None:
    assert held(trace, "weights") == GIB
    assert held(trace, "optimizer") == 2 * GIB
    assert held(trace, "activations") == 0
    assert batch_bytes(trace) == 8 * MIB


def test_a_data_set_in_memory_does_not_fit_where_streaming_does(trace: Trace) -> None:
    streamed = named(Session(data=14 * GIB), trace)["host RAM"]
    loaded = named(Session(data=14 * GIB, in_memory=True), trace)["host RAM"]

    assert streamed.verdict == FITS
    assert loaded.verdict == NOT
    assert loaded.low - streamed.low == 14 * GIB


def test_workers_multiply_batches_and_may_copy_the_data_set(trace: Trace) -> None:
    alone = named(Session(data=4 * GIB, in_memory=True), trace)["host RAM"]
    helped = named(Session(data=4 * GIB, in_memory=True, workers=2, prefetch=3), trace)

    assert helped["/dev/shm"].low == 2 * 3 * 8 * MIB
    assert helped["host RAM"].high - alone.high > 2 * 4 * GIB
    assert (alone.verdict, helped["host RAM"].verdict) == (FITS, TIGHT), (
        "copies grow only where the data is a list of Python objects: tight, not a certain no"
    )


def test_the_operations_of_a_graph_take_host_memory_of_their_own(trace: Trace) -> None:
    plain = {on: named(Session(), trace, on)["host RAM"] for on in ("colab-cpu", "colab-t4")}
    trace.facts["operations"] = 10_000
    graph = {on: named(Session(), trace, on)["host RAM"] for on in plain}

    for on, need in graph.items():
        assert need.high - plain[on].high == 10_000 * PER_OPERATION
        assert (need.low == plain[on].low) == (on == "colab-t4"), "measured on a CPU: on a GPU it may be less"


def test_disk_holds_the_checkpoints_kept_one_being_written_and_the_data(trace: Trace) -> None:
    need = named(Session(data=5 * GIB, keep=2), trace, "kaggle-t4x2")["disk"]

    assert need.high == (2 + 1) * 3 * GIB + 5 * GIB
    assert need.verdict == FITS
    assert named(Session(data=5 * GIB, keep=5), trace, "kaggle-t4x2")["disk"].verdict == NOT


def test_steps_are_counted_against_the_platforms_limit(trace: Trace) -> None:
    need = named(Session(steps=50_000), trace)["time"]

    assert need.verdict == NOT
    assert need.note == "21,600 of 50,000 steps fit before the 12 h limit"
    assert named(Session(steps=1000), trace)["time"].verdict == FITS


def test_a_limit_nobody_knows_spoils_nothing(trace: Trace) -> None:
    need = named(Session(workers=4), trace)["/dev/shm"]

    assert need.limit is None and need.verdict == UNKNOWN
    assert worst([FITS, need.verdict]) == FITS


def test_an_unknown_platform_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError) as error:
        targets(["colab-t5"])

    assert "`colab-t4`" in str(error.value)


def test_a_card_can_be_named_without_a_platform() -> None:
    assert target("rtx-3090").device.name == "RTX 3090"
    assert target("rtx-3090").ram is None


def test_a_platform_whose_device_is_unknown_is_refused_in_words() -> None:
    with pytest.raises(UsageError) as error:
        target("colab-tpu-v5e1")

    assert "TPU" in str(error.value)


def test_each_place_is_planned_once() -> None:
    assert [place.id for place in targets(["colab-t4", "THIS", "colab-t4"])] == ["colab-t4", "this"]


def test_sizes_are_read_as_text_files_and_folders(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a").write_bytes(b"x" * 1000)
    (tmp_path / "b").write_bytes(b"x" * 24)

    assert Session.of({"data": "20GB"}).data == 20 * 10**9
    assert Session.of({"data": str(tmp_path)}).data == 1024
    with pytest.raises(UsageError):
        Session.of({"data": "much"})
    with pytest.raises(UsageError):
        Session.of({"workers": -1})
    with pytest.raises(UsageError):
        Session.of({"worker": 2})  # type: ignore[typeddict-unknown-key]


def test_caches_shuffle_buffers_and_copies_are_counted_with_their_reasons(trace: Trace) -> None:
    trace.facts["batch"] = 8  # samples of 1 MiB
    plain = named(Session(data=GIB), trace)
    cached = named(Session(data=GIB, samples=3000, cache="ram", shuffle=1000), trace)["host RAM"]
    on_disk = named(Session(data=GIB, samples=3000, cache="disk", augmented=1), trace)["disk"]

    assert cached.parts["cache of samples"] == 3000 * MIB and "cache()" in cached.why["cache of samples"]
    assert cached.high - plain["host RAM"].high == 3000 * MIB + 2.5 * 1000 * MIB
    assert on_disk.high - plain["disk"].high == 2 * 3000 * MIB + GIB
    with pytest.raises(UsageError):
        Session.of({"cache": "ram"})


def test_every_peak_rate_is_of_a_known_card_and_says_who_published_it() -> None:
    text = resources.files("buoy.planner").joinpath("rates.csv").read_text(encoding="utf-8")
    known = {device.id for device in all_devices()}
    for row in csv.DictReader(text.splitlines()):
        assert row["id"] in known and row["source"] and row["date"], row


def test_every_smaller_sibling_is_itself_a_row() -> None:
    for sibling in all_siblings():
        assert not sibling.smaller or any(other.name == sibling.smaller for other in all_siblings()), sibling
