"""A DataLoader worker eats memory until the kernel kills it; the main process is told by torch."""

import stage  # isort: skip
import torch

held = []


class Leaky(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        held.append(b"x" * (32 << 20))
        return torch.zeros(1)


if __name__ == "__main__":
    loader = iter(torch.utils.data.DataLoader(Leaky(), batch_size=1, num_workers=1))
    stage.ready()
    for _ in loader:
        pass
