"""`simplegraph advise` on whole programs, on the emulator: the first line is right, and the program is unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Distribution
from torch.optim import optimizer as torch_optimizer

import simplegraph as sg
from simplegraph import __main__ as cli
from simplegraph.base import extras, patches
from simplegraph.doctor.advise import Advisor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the emulator's answers; tests/gpu has times")
ROOT = Path(__file__).parent.parent.parent
HEAD = "import torch\nfrom torch import nn\nimport simplegraph as sg\ntorch.manual_seed(0)\n"

Advise = Callable[[str], "Told"]


@pytest.fixture(autouse=True)
def distributions_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do by default: the first use of torch.compile switches it off for the process."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


class Told:
    """What the command said of a program, and what the program printed."""

    def __init__(self, status: int, out: str, err: str, report: Path) -> None:
        self.status, self.out, self.err = status, out, err
        self.report: Any = json.loads(report.read_text())
        self.page = report.with_suffix(".html").read_text()
        self.lines: list[str] = self.report["lines"]

    @property
    def first(self) -> str:
        return self.lines[0].splitlines()[0]

    @property
    def change(self) -> str:
        return self.lines[0].splitlines()[1].strip()


@pytest.fixture
def advise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Advise:
    """Runs the command on a program, once without it too, and compares what the program prints, and that it prints."""

    def run(program: str) -> Told:
        script, report = tmp_path / "program.py", tmp_path / "advice.html"
        script.write_text(HEAD + program)
        capfd.readouterr()
        plain = cli._run_python(["python", str(script)])
        printed = capfd.readouterr().out
        status = cli.main(["advise", "--report", str(report), "--", "python", str(script)])
        told = Told(status, *capfd.readouterr(), report.with_suffix(".json"))
        assert printed
        assert (told.status, told.out) == (plain, printed)
        return told

    return run


POLICY = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    def forward(self, x):
        return self.net(x).argmax(-1)
policy = Policy().eval()
"""
LOOP = """
with torch.inference_mode():
    print(sum(int(policy(torch.randn(1 + i % 2, 8)).sum()) for i in range(40)))
"""


def test_an_evaluation_loop_is_told_the_line_that_gives_it_graphs(advise: Advise) -> None:
    told = advise(POLICY + LOOP)
    assert told.first == "`policy` (program.py:15): 40 calls of 6 operators; one graph serves it"
    assert told.change == "policy = sg.wrap(policy, capture_sizes=[1, 2])"
    held: dict[str, Any] = {}
    exec(HEAD + POLICY + told.change + LOOP, held)
    assert held["policy"].graph_stats.replays


def test_no_times_are_told_of_an_emulated_graph(advise: Advise) -> None:
    told = advise(POLICY + LOOP)
    assert " ms" not in told.err
    assert "/s" not in told.first
    assert told.report["device"] == "emulated"


PPO = """
from torch.distributions import Categorical
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs = torch.randn(4, 4)
for update in range(4):
    store = []
    for t in range(16):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
        store.append((obs, action, logprob, value.flatten()))
        obs = torch.tanh(obs + 0.1 * action[:, None]) + 0.01 * torch.randn(4, 4)
    b_obs, b_act, b_logp, b_val = (torch.cat(part) for part in zip(*store))
    for mb in torch.randperm(64).split(16):
        _, newlogp, entropy, newval = agent.get_action_and_value(b_obs[mb], b_act[mb])
        ratio = (newlogp - b_logp[mb]).exp()
        loss = -(torch.randn(16) * ratio).mean() + (newval.flatten() - b_val[mb]).pow(2).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
print([p.double().sum().item() for p in agent.parameters()], loss.item())
"""


def test_a_ppo_loop_is_told_of_its_update_and_of_the_method_that_acts(advise: Advise) -> None:
    told = advise(PPO)
    update, act = told.lines
    assert re.match(r"`optimizer.step` \(program.py:35\): 16 steps of \d+ operators; one graph serves it\n", update)
    assert "put program.py:29 to 35 into a function; sg.train_step(function, optimizers=optimizer)" in update
    assert "pass fused=True to Adam; call torch.distributions.Distribution.set_default_validate_args(False)" in update
    assert re.match(r"`agent.get_action_and_value` \(program.py:24\): 64 calls of \d+ operators; one graph", act)
    assert "agent.get_action_and_value = sg.wrap(agent.get_action_and_value, capture_sizes=[4])" in act


def test_what_a_ppo_loop_is_told_works(advise: Advise) -> None:
    """The lines of the update, put into a function as told, and the method, wrapped as told, are served by graphs."""
    source = (HEAD + PPO).splitlines()
    body = "\n".join("    " + line.strip() for line in source[28:35])
    step = f"def function(mb):\n    global loss\n{body}\n    return loss\n"
    step += "function = sg.train_step(function, optimizers=optimizer)\n"
    told = advise(PPO)
    act, call = told.lines[1].splitlines()[1].strip().split("; call ")
    edited = [*source[:18], "torch.distributions.Distribution.set_default_validate_args(False)", act]
    edited += [*step.splitlines(), *source[18:28], "        loss = function(mb)", *source[35:]]
    program = "\n".join(edited).replace("eps=1e-5", "eps=1e-5, fused=True").replace("global loss", "pass")
    held: dict[str, Any] = {}
    exec(program, held)
    assert call == "torch.distributions.Distribution.set_default_validate_args(False)"
    assert held["function"].graph_stats.replays
    assert held["agent"].get_action_and_value.graph_stats.replays


STEP = """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters(), fused=True)
def step(x, y):
    opt.zero_grad()
    loss = (net(x) - y).pow(2).mean()
    loss.backward()
    opt.step()
    return loss.item()
for _ in range(12):
    loss = step(torch.randn(6, 4), torch.randn(6, 1))
print(loss, [t.double().sum().item() for t in net.state_dict().values()], torch.rand(1).item())
"""


def test_a_step_that_is_a_function_is_told_of_its_decorator(advise: Advise) -> None:
    told = advise(STEP)
    assert told.first.startswith("`opt.step` (program.py:12): 12 steps of ")
    assert told.change == "@sg.train_step(optimizers=opt) above def step (program.py:8)"


def test_a_line_that_reads_a_result_is_named_where_lines_become_a_function(advise: Advise) -> None:
    told = advise(
        """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    loss = net(torch.randn(6, 4)).pow(2).mean()
    total = loss.item()
    loss.backward()
    opt.step()
    opt.zero_grad()
print(total)
"""
    )
    assert "put program.py:9 to 12 into a function; sg.train_step(function, optimizers=opt)" in told.change
    assert told.change.endswith("lines that read results back stay outside: 10 `total = loss.item()`")


def test_a_step_of_one_line_is_named_by_that_line(advise: Advise) -> None:
    told = advise(
        """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(12):
    net(torch.randn(6, 4)).pow(2).mean().backward(); opt.step(); opt.zero_grad()
print("done")
"""
    )
    assert told.change == "put program.py:9 into a function; sg.train_step(function, optimizers=opt)"


def test_a_step_whose_optimizer_no_graph_holds_is_told_of_graphs_without_it(advise: Advise) -> None:
    told = advise(STEP.replace("AdamW(net.parameters(), fused=True)", "RAdam(net.parameters())"))
    assert told.first.startswith("`opt.step` (program.py:12): 12 steps of ")
    assert told.change == "wrap what the step calls, <Sequential>: model = sg.wrap(model, training=True)"
    held: dict[str, Any] = {}
    program = STEP.replace("AdamW(net.parameters(), fused=True)", "RAdam(net.parameters())")
    exec(HEAD + program.replace("def step", "net = sg.wrap(net, training=True)\ndef step"), held)
    assert held["net"].graph_stats.replays


TRAINER = """
class Trainer:
    def fit(self, net, opt, batches):
        for x, y in batches:
            opt.zero_grad()
            loss = (net(x) - y).pow(2).mean()
            loss.backward()
            opt.step()
"""


def test_a_step_that_a_library_makes_is_told_of_graphs_of_its_model(
    advise: Advise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_trainer.py").write_text(TRAINER)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    model = "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))\n"
    fit = """
import a_trainer
batches = [(torch.randn(6, 4), torch.randn(6, 1)) for _ in range(12)]
a_trainer.Trainer().fit(net, torch.optim.SGD(net.parameters(), 0.1), batches)
print(sum(p.double().sum().item() for p in net.parameters()))
"""
    told = advise(model + fit)
    assert told.first.startswith("`SGD.step` (program.py:9): 12 steps of ")
    assert told.change == "wrap what the step calls, <Sequential>: model = sg.wrap(model, training=True)"
    held: dict[str, Any] = {}
    exec(HEAD + model + "net = sg.wrap(net, training=True)\n" + fit, held)
    assert held["net"].graph_stats.replays


GENERATE = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)).eval()
def run():
    for i in range(5):
        ids = torch.randint(3, 64, (1, 5 + i % 2))
        print(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist())
"""


def test_a_generation_is_told_of_graph_generation(advise: Advise) -> None:
    pytest.importorskip("transformers")
    told = advise(GENERATE + "run()\n")
    assert told.first.startswith("`model.generate` (program.py:12): 5 calls of ")
    assert told.change == (
        "simplegraph.integrations.transformers.graph_generation(model, max_batch_size=1, max_length=64)"
    )
    held: dict[str, Any] = {}
    exec(HEAD + "import simplegraph.integrations.transformers, simplegraph\n" + GENERATE, held)
    with eval(told.change, held) as graphs:
        held["run"]()
        assert graphs.stats.replays


def test_an_encoder_is_told_of_graph_encoder(advise: Advise) -> None:
    pytest.importorskip("transformers")
    told = advise(
        """
from transformers import BertConfig, BertModel
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = BertModel(BertConfig(vocab_size=64, max_position_embeddings=64, **sizes)).eval()
with torch.inference_mode():
    for i in range(24):
        ids = torch.randint(3, 64, (2, 5 + i % 7))
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
print(out.sum().item())
"""
    )
    assert told.first.startswith("`model` (program.py:12): 24 calls of ")
    assert told.change == "simplegraph.integrations.transformers.graph_encoder(model, max_batch_size=2)"


@pytest.mark.parametrize(
    ("mode", "first"),
    [("FULL_AND_PIECEWISE", "graphs captured at "), ("NONE", "`engine` has graphs already, but runs eagerly: ")],
)
def test_an_engine_with_graphs_is_told_if_they_serve(mode: str, first: str, tmp_path: Path) -> None:
    report = tmp_path / "advice.html"
    program = ["bench.generate", "--model", "tiny", "--max-tokens", "24", "--prompt"]
    command = ["-m", "simplegraph", "advise", "--report", str(report), "--", "python", "-m", *program, "5 17 3"]
    command += ["--mode", mode]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ") == 23
    line = json.loads(report.with_suffix(".json").read_text())["lines"][0]
    assert line.startswith(first)
    assert line.endswith(": 24")


METHODS = """
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value = (nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.ReLU(), nn.Tanh()) for _ in range(2))
    def act(self, x):
        return self.scores(x).argmax(-1)
    def scores(self, x):
        return self.body(x) + self.value(x)
    def evaluate(self, batches):
        return sum(int(self.act(batch).sum()) for batch in batches)
    def refine(self, x):
        opt.zero_grad()
        loss = self.scores(x).pow(2).mean()
        loss.backward()
        opt.step()
        return loss.item()
actor = Actor()
opt = torch.optim.SGD(actor.parameters(), lr=0.1)
"""


def test_of_methods_that_call_each_other_the_outermost_is_wrapped(advise: Advise) -> None:
    told = advise(
        METHODS + "with torch.no_grad():\n    print([int(actor.act(torch.randn(2, 4))[0]) for _ in range(24)])\n"
    )
    assert told.first.startswith("`actor.act` (program.py:25): 24 calls of ")
    assert told.change == "actor.act = sg.wrap(actor.act, capture_sizes=[2])"
    assert len(told.lines) == 1


def test_a_method_that_is_passed_a_loader_is_left_for_what_it_calls(advise: Advise) -> None:
    told = advise(
        METHODS
        + "class Loader(list): pass\nwith torch.no_grad():\n    for _ in range(3):\n"
        + "        print(actor.evaluate(Loader(torch.randn(2, 4) for _ in range(12))))\n"
    )
    assert told.first.startswith("`self.act` (program.py:15): ")
    assert told.change == "self.act = sg.wrap(self.act, capture_sizes=[2]) once, as in __init__"


def test_a_method_that_trains_is_told_of_train_step(advise: Advise) -> None:
    told = advise(METHODS + "for _ in range(12):\n    loss = actor.refine(torch.randn(2, 4))\nprint(loss)\n")
    assert told.first.startswith("`opt.step` (program.py:20): ")
    assert told.change == "@sg.train_step(optimizers=opt) above def refine (program.py:16)"


def test_methods_are_as_they_were() -> None:
    class Actor(nn.Linear):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self(x) * 2 + 1) * 3

    class Critic(Actor):
        pass

    act, critic = Actor.act, Critic(4, 4)
    with Advisor(sg) as advisor, torch.no_grad():
        for _ in range(8):
            critic.act(torch.ones(2, 4))
            assert Actor.act is act
        assert Critic.act is not act
    assert Critic.act is act
    assert "act" not in vars(Critic)
    assert "critic.act = sg.wrap(critic.act, capture_sizes=[2])" in str(advisor)


# What is in the way.


def test_what_is_in_the_way_is_named_with_the_users_line(advise: Advise) -> None:
    told = advise(
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        y = self.lin(x)
        return y if y.sum().item() > 0 else -y * 2 + 1
gate = Gate().eval()
with torch.no_grad():
    print(sum(gate(torch.randn(2, 4)).sum().item() for _ in range(24)))
"""
    )
    assert "; no graph: batch size 2 failed at " in told.first.replace("capturing ", "")
    assert "program.py:12 `return y if y.sum().item() > 0 else -y * 2 + 1`" in told.lines[0]


def test_a_model_that_reads_back_between_its_parts_is_told_of_wrap_parts(advise: Advise) -> None:
    told = advise(
        """
def tower():
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.ReLU())))
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = tower(), tower()
    def forward(self, x):
        y = self.backbone(x)
        return self.head(y[y.sum(1) > -9])
detector = Detector().eval()
with torch.no_grad():
    print(sum(detector(torch.randn(3, 4)).sum().item() for _ in range(24)))
"""
    )
    assert told.change == "sg.wrap_parts(detector, inputs=inputs)"


def test_a_call_under_grad_mode_without_a_step_is_told_of_no_grad(advise: Advise) -> None:
    told = advise(POLICY + "print(sum(int(policy(torch.randn(1, 8)).sum()) for i in range(30)))\n")
    assert told.change == "policy = sg.wrap(policy, capture_sizes=[1]); call it under torch.no_grad()"


def test_a_module_in_training_mode_is_told_what_serves_it_there(advise: Advise) -> None:
    told = advise(POLICY + "policy.train()\n" + LOOP)
    assert told.change == "policy.forward = sg.wrap(policy.forward, capture_sizes=[1, 2])"
    held: dict[str, Any] = {}
    exec(HEAD + POLICY + "policy.train()\n" + told.change + LOOP, held)
    assert held["policy"].forward.graph_stats.replays


def test_shapes_that_vary_beyond_the_batch_get_exact_graphs(advise: Advise) -> None:
    told = advise(
        """
net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.ReLU(), nn.Conv1d(2, 2, 1), nn.Tanh()).eval()
with torch.no_grad():
    print(sum(net(torch.randn(1, 2, 3 + i % 2)).sum().item() for i in range(30)))
"""
    )
    assert told.change == "net = sg.wrap(net, exact_shapes=True)"


def test_many_batch_sizes_are_planned(advise: Advise) -> None:
    told = advise(POLICY + LOOP.replace("1 + i % 2", "1 + i % 20"))
    sizes = eval(told.change.partition("capture_sizes=")[2].rstrip(")"))
    assert len(sizes) == 8
    assert sizes[-1] >= 18


def test_a_module_that_cannot_be_copied_says_so(advise: Advise) -> None:
    told = advise(POLICY.replace("super().__init__()", "super().__init__(); self.log = open('/dev/null')") + LOOP)
    assert re.search(r"; no graph: TypeError: cannot pickle '(_io\.)?TextIOWrapper' (object|instances)$", told.first)


# The program is as it was.

CHANGING = {
    "a hook that fills a list": """
seen = []
policy.net[1].register_forward_hook(lambda module, args, out: seen.append(out.mean().item()))
"""
    + LOOP
    + "print(len(seen), sum(seen))\n",
    "a global counter": """
count = 0
def counting(module, args):
    global count
    count += 1
policy.register_forward_pre_hook(counting)
"""
    + LOOP
    + "print(count)\n",
    "state of the module": """
policy.count = 0
plain = policy.forward
class Counting(Policy):
    def forward(self, x):
        self.count += 1
        self.last = super().forward(x)
        return self.last
policy.__class__ = Counting
"""
    + LOOP
    + "print(policy.count, policy.last.tolist())\n",
    "random numbers": """
import random, numpy
random.seed(0); numpy.random.seed(0)
class Noisy(Policy):
    def forward(self, x):
        return super().forward(x + torch.rand_like(x) + random.random() + float(numpy.random.rand()))
policy.__class__ = Noisy
"""
    + LOOP
    + "print(random.random(), numpy.random.rand(), torch.rand(1).item())\n",
    "buffers": """
policy.net.insert(1, nn.BatchNorm1d(16)); policy.train()
"""
    + LOOP.replace("1 + i % 2", "2 + i % 2")
    + "print(policy.net[1].running_mean.tolist(), policy.net[1].num_batches_tracked.item())\n",
    "arguments": """
class Filling(Policy):
    def forward(self, x, out):
        out.append(super().forward(x)); x.add_(1)
        return out[-1]
policy.__class__ = Filling
out, x = [], torch.zeros(1, 8)
with torch.no_grad():
    for _ in range(30):
        policy(x, out)
print(len(out), x.sum().item())
""",
}


@pytest.mark.parametrize("name", CHANGING)
def test_trials_leave_no_trace_in_the_program(name: str, advise: Advise) -> None:
    """The fixture compares all that it prints with a run that was not watched."""
    told = advise(POLICY + CHANGING[name])
    assert told.report["watched"][0]["trial"] is not None


def test_torch_is_as_it_was() -> None:
    call, replaced, harmless = nn.Module.__call__, patches.installed(), set(extras.harmless_step_hooks)
    hooks = list(torch_optimizer._global_optimizer_post_hooks)  # type: ignore[attr-defined]
    with Advisor(sg):
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call
    assert list(torch_optimizer._global_optimizer_post_hooks) == hooks  # type: ignore[attr-defined]
    assert extras.harmless_step_hooks == harmless
    assert sys.getprofile() is None
    assert patches.installed() == replaced


def test_a_program_with_graphs_of_ours_keeps_them_while_it_is_watched(advise: Advise) -> None:
    told = advise(
        POLICY
        + "policy = sg.wrap(policy, capture_sizes=[1, 2], progress=False)\n"
        + LOOP
        + "print(policy.graph_stats.replays, dict(policy.graph_stats.eager))\n"
        + STEP.replace("def step", "@sg.train_step(optimizers=opt)\ndef step").replace("loss.item()", "loss")
        + "print(step.graph_stats.replays, dict(step.graph_stats.eager))\n"
    )
    assert [line for line in told.lines if line.startswith("graphs captured at ")]


def test_a_module_that_is_traced_is_not_watched_meanwhile(advise: Advise) -> None:
    told = advise(
        POLICY
        + LOOP
        + "with torch.no_grad():\n    traced = torch.jit.trace(policy, (torch.ones(1, 8),))\n"
        + "    print(traced(torch.ones(1, 8)), torch.func.vmap(policy)(torch.ones(3, 1, 8)).sum())\n"
        + "    print(torch.fx.symbolic_trace(policy)(torch.ones(1, 8)))\n"
        + "    print(torch.export.export(policy, (torch.ones(1, 8),)).module()(torch.ones(1, 8)))\n"
    )
    assert told.first.startswith("`policy` (program.py:15): 41 calls of 6 operators; one graph serves it")


def test_modules_that_are_called_a_few_times_at_one_line_are_one_line(advise: Advise) -> None:
    told = advise(
        POLICY
        + "policies = [Policy() for _ in range(9)]\nwith torch.no_grad():\n"
        + "    print([one(torch.ones(1, 8)).item() for one in policies])\n"
    )
    assert told.lines == ["`one` (program.py:15): 9 calls, too few to try graphs for"]


def test_hooks_on_all_modules_are_named_as_what_is_in_the_way(advise: Advise) -> None:
    told = advise(
        POLICY
        + "handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: None)\n"
        + LOOP
        + "handle.remove()\n"
    )
    assert told.lines[0].startswith("not watched, because of forward hooks on all modules; calls: ")


def test_a_compiled_program_is_compiled_as_it_was(advise: Advise) -> None:
    told = advise(
        POLICY
        + "from torch._dynamo.utils import counters\nbefore = counters['stats']['unique_graphs']\n"
        + "policy = torch.compile(policy, backend='eager', fullgraph=True)\n"
        + LOOP
        + "print(counters['stats']['unique_graphs'] - before)\n"
    )
    assert told.lines[0].startswith("not watched, because the program uses torch.compile, ")


# Programs that end otherwise.


@pytest.mark.parametrize(
    ("end", "status"),
    [("import sys; sys.exit(7)", 7), ("raise RuntimeError('over')", 1), ("import sys; sys.exit('over')", 1)],
)
def test_a_program_that_fails_is_reported_and_keeps_its_status(end: str, status: int, advise: Advise) -> None:
    told = advise(POLICY + LOOP + end + "\n")
    assert told.status == status
    assert told.first.startswith("`policy` ")


def test_a_program_that_is_interrupted_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "program.py"
    script.write_text(HEAD + POLICY + LOOP + "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        cli.main(["advise", "--report", str(tmp_path / "advice.html"), "--", "python", str(script)])
    assert "1. `policy` " in capfd.readouterr().err


def test_a_program_without_modules_is_told_so(advise: Advise) -> None:
    told = advise("print(torch.ones(2).sum().item())\n")
    assert told.lines == [
        "no torch.nn.Module was called in this process: to functions of tensors, sg.wrap gives graphs, too"
    ]


def test_too_few_calls_are_told_so(advise: Advise) -> None:
    told = advise(POLICY + LOOP.replace("40", "3"))
    assert told.lines == ["`policy` (program.py:15): 3 calls, too few to try graphs for"]


def test_a_program_that_forks_is_reported_once(tmp_path: Path) -> None:
    script, report = tmp_path / "program.py", tmp_path / "advice.html"
    fork = "import os\nchild = os.fork()\n" + LOOP + "if child: os.waitpid(child, 0); print('parent')\n"
    script.write_text(HEAD + POLICY + LOOP.replace("40", "14") + fork)
    command = [sys.executable, "-m", "simplegraph", "advise", "--report", str(report), "--", "python", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("simplegraph advise:") == 1
    assert done.stdout.count("parent") == 1
    watched = json.loads(report.with_suffix(".json").read_text())["watched"]
    assert sum(one["calls"] for one in watched) == 54


def test_a_program_is_advised_where_no_optional_package_is_installed(tmp_path: Path) -> None:
    script, report = tmp_path / "program.py", tmp_path / "advice.html"
    absent = ("transformers", "triton", "prometheus_client", "diffusers", "tensordict")
    script.write_text(f"import sys\nsys.modules |= dict.fromkeys({absent})\n" + HEAD + POLICY + LOOP)
    command = [sys.executable, "-m", "simplegraph", "advise", "--report", str(report), "--", "python", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "   policy = sg.wrap(policy, capture_sizes=[1, 2])" in done.stderr.splitlines()


def test_calls_of_another_thread_are_watched(advise: Advise) -> None:
    loop = "\n".join("    " + line for line in LOOP.splitlines())
    told = advise(
        POLICY + f"import threading\ndef work():\n{loop}\nt = threading.Thread(target=work)\nt.start(); t.join()\n"
    )
    assert told.first.startswith("`policy` (program.py:17): 40 calls of 6 operators; one graph serves it")


def test_one_of_several_ranks_is_not_watched(advise: Advise) -> None:
    ranks = "import torch.distributed as d\nd.is_initialized, d.get_world_size = lambda: True, lambda: 2\n"
    before = torch.distributed.is_initialized, torch.distributed.get_world_size
    try:
        told = advise(POLICY + ranks + LOOP)
    finally:
        torch.distributed.is_initialized, torch.distributed.get_world_size = before
    assert told.lines[0].startswith("not watched, because torch.distributed has several ranks; calls: ")


def test_the_report_is_one_page_without_scripts(advise: Advise) -> None:
    told = advise(POLICY + LOOP)
    assert "<script" not in told.page
    assert "policy = sg.wrap(policy, capture_sizes=[1, 2])" in told.page
    assert "[1, 8] x 20" in told.page


@pytest.mark.parametrize("report", ["advice.json", "missing/advice.html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_program_runs(
    report: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "program.py"
    script.write_text("print('ran')\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["advise", "--report", str(tmp_path / report), "--", "python", str(script)])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "expected an HTML file in a folder to write to" in printed.err
    assert "ran" not in printed.out


def test_the_command_needs_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["advise", "--"])
    assert ended.value.code == 2
    assert "no program to run; expected -- python script.py ..." in capsys.readouterr().err


def test_the_advisor_is_used_in_a_program_too() -> None:
    policy = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
    with Advisor(sg) as advisor, torch.no_grad():
        for _ in range(24):
            policy(torch.ones(2, 4))
    assert "   policy = sg.wrap(policy, capture_sizes=[2])" in str(advisor).splitlines()
    assert sg.unwrap(policy) is policy
