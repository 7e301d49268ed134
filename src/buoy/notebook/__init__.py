"""buoy in a notebook: `%load_ext buoy`.

extension.py  starts the recorder for this kernel, shows what killed the previous one or ended a training in this one
magics.py     `%buoy why`, `top`, `check`, `report`, `plan`, `profile`, `off`
namespace.py  the model, batch, optimizer and loss among the notebook's names
cards.py      what is shown below a cell, and the card that follows a training
"""
