"""DataLoader workers that are told to stop at the end, as always: nothing died."""

import stage  # isort: skip
import torch


class Small(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1)


if __name__ == "__main__":
    stage.ready()
    loader = torch.utils.data.DataLoader(Small(), num_workers=2, persistent_workers=True)
    for _ in loader:
        pass
