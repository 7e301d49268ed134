"""buoy in a notebook: `%load_ext buoy`.

extension.py  starts the recorder for this kernel, and shows what killed the one before
before.py     the kernels that recorded into the same folder before this one
magic.py      `%buoy why`, `top`, `check`, `report`, `off`
planning.py   `%buoy plan`, of what namespace.py finds among the notebook's names
profiling.py  `%buoy profile`
display.py    what is shown below a cell
live.py       the card that follows a training, drawn by the training's own steps
startup.py    `buoy notebook install`: loaded by itself in each new kernel
"""
