"""A kernel below a server of its own: jupyter_client starts a real ipykernel, which records itself.

The server then ends as it is told, or does not; the campaign judges the kernel.
"""

import os
import signal
import sys
import time

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

how, cell = sys.argv[1:]
kernel = KernelManager()
kernel._kernel_spec = KernelSpec(
    argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    display_name="python",
    language="python",
)
here = os.path.dirname(os.path.abspath(__file__))
kernel.start_kernel(
    cwd=os.getcwd(),
    env={
        **os.environ,
        "IPYTHONDIR": os.path.join(os.environ["DEATHS_STAGE"], "ipython"),
        "PYTHONPATH": os.pathsep.join((os.environ.get("PYTHONPATH", ""), here)),
    },
)
client = kernel.client()
client.start_channels()
client.wait_for_ready(timeout=60)
client.execute_interactive("import stage; stage.say('ready')")
if cell:
    client.execute(cell)
while kernel.provisioner.process.poll() is None:  # and reaped, as a server does
    time.sleep(0.005)
    if how != "stays" and os.path.exists(os.path.join(os.environ["DEATHS_STAGE"], "go")):
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(0)
