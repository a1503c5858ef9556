"""Checks an installation from a folder without the checkout: ``python installed.py``; CI runs it."""

import importlib.util
import sys

import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.errors import install_command
from simplegraph.doctor.explain import explain

sys.path.pop(0)  # this file's folder
module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).eval()
model = sg.wrap(module, capture_sizes=[1, 2, 4, 8], progress=False)
with torch.inference_mode():
    model.capture_graphs(torch.randn(5, 64))
    x = torch.randn(5, 64)
    model(x)  # the graph's proof
    torch.testing.assert_close(model(x), module(x))
report = model.graph_report().to_dict()
if (report["captures"], report["replays"] > 0) != (4, True):
    raise SystemExit(f"captured 4 sizes and replayed none:\n{model.graph_report()}")
if not (told := install_command("prometheus")) == "pip install prometheus-client":
    raise SystemExit(f"a message would say {told}")
if "reads a value on the host" not in (said := explain("capture-failed")):
    raise SystemExit(f"the wheel has no troubleshooting page that says more than:\n{said}")
if found := [name for name in ("bench", "tests", "docs") if importlib.util.find_spec(name)]:
    raise SystemExit(f"the wheel installed {', '.join(found)}, too")
print(f"simplegraph {sg.__version__}: captured {report['captures']} sizes, replayed {report['replays']} calls")
