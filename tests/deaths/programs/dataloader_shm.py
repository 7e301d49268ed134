"""Batches that do not fit into /dev/shm."""

import stage  # isort: skip
import torch


class Big(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(4 << 20)


if __name__ == "__main__":
    loader = iter(torch.utils.data.DataLoader(Big(), batch_size=1, num_workers=1))
    stage.ready()
    for _ in loader:
        pass
