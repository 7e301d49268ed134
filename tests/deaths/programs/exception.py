"""A plain bug in the loop."""

import stage


def train_step(batch):
    return batch["labels"]


stage.ready()
train_step({"inputs": 1})
