"""One life of a training in a process of its own: `python -m tests.training.life NAME FOLDER`."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch

from tests.training.trainings import TRAININGS, Stage

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    name, folder = sys.argv[1:]
    TRAININGS[name](Stage(folder, f"{folder}.log", None, 0, pause=0.005))
