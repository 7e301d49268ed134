"""A bug in the main process while DataLoader workers run; they are told to stop on the way out."""

import stage  # isort: skip
import torch


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


if __name__ == "__main__":
    batches = iter(torch.utils.data.DataLoader(Endless(), num_workers=2))
    next(batches)
    stage.ready()
    {}["no such column"]
