"""Every kind of the campaign, in one table. A new kind is a function and a line here."""

from __future__ import annotations

from tests.kills import calls, damage, instants, keras_start, power, power_mirror, power_removal, torch_start
from tests.kills.kind import Kind

ALL = [
    Kind(
        "instant", "the trainer is killed at a random instant; the writer finishes", instants.killed_trainer
    ),
    Kind("instant-all", "trainer and writer are killed at a random instant", instants.killed_all),
    Kind("at-once", "the trainer is killed right after save returned", instants.killed_at_once),
    Kind("torch-start", "a whole PyTorch training, each life a new process", torch_start.killed_training),
    Kind("keras-start", "a whole Keras training, each life a new process", keras_start.killed_training),
    Kind("call", "the writer is killed at each call that reaches the disk", calls.killed_at_each_call),
    Kind("call-traced", "the same, at the system call itself, by strace", calls.killed_at_each_traced_call),
    Kind("no-space", "ENOSPC, EDQUOT and EIO at each call", calls.failing_at_each_call),
    Kind("full-disk", "a small file system fills up", calls.full_disk),
    Kind("power-loss", "unsynced effects of a save are dropped", power.power_loss),
    Kind("power-check", "the same without fsync is caught", power.power_loss_without_fsync),
    Kind("power-removal", "unsynced effects of a removal are dropped", power_removal.power_loss_removal),
    Kind(
        "power-removal-check",
        "the same without fsync is caught",
        power_removal.power_loss_removal_without_fsync,
    ),
    Kind(
        "power-mirror",
        "unsynced effects of a copy and a removal in a mirror are dropped",
        power_mirror.power_loss_mirror,
    ),
    Kind(
        "power-mirror-check",
        "the same without fsync is caught",
        power_mirror.power_loss_mirror_without_fsync,
    ),
    Kind("bit-flip", "single bits flipped", damage.flipped_bits),
    Kind("cut-short", "files cut short", damage.cut_short),
]
