"""MACE: energy and forces of a molecule are one replay, the gradient that gives the forces included."""

from __future__ import annotations

from collections.abc import Callable

import e3nn
import torch
from torch import Tensor, nn

import simplegraph as sg

torch.serialization.add_safe_globals([slice])  # which e3nn 0.4.4 loads its constants with
e3nn.set_optimization_defaults(jit_script_fx=False)  # before a model is made, or its layers are TorchScript
torch._C._jit_set_texpr_fuser_enabled(False)  # spherical harmonics are TorchScript, whose fused backward hides tensors
from e3nn import o3  # noqa: E402
from mace import modules  # noqa: E402


# Recipe
def graphed_forces(model: nn.Module) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]:
    """Return what computes energy and forces by graphs, one for each number of atoms and edges."""

    def energy_and_forces(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():  # of the positions, which MACE marks: so it is passed a copy
            out = model({**data, "positions": data["positions"].clone()}, compute_force=True)
        return out["energy"].detach(), out["forces"].detach()

    return torch.no_grad()(sg.wrap(energy_and_forces, exact_shapes=True))


# Comparison
def main() -> dict[str, Callable[[], object]]:
    """Compare energies and forces, and return what computes them, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.float64)
    blocks = modules.interaction_classes
    model = modules.MACE(
        r_max=4.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
        interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps("16x0e"),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=nn.functional.silu,
        atomic_energies=torch.zeros(2).numpy(),
        avg_num_neighbors=4.0,
        atomic_numbers=[1, 8],
        correlation=2,
    )
    model = model.to(device).eval()
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    edges = pairs[pairs[:, 0] != pairs[:, 1]].T
    fixed = {"edge_index": edges, "node_attrs": torch.eye(2).repeat(3, 1), "batch": torch.zeros(6, dtype=torch.long)}
    fixed |= {"shifts": torch.zeros(30, 3), "unit_shifts": torch.zeros(30, 3), "cell": torch.zeros(3, 3)}
    fixed |= {"ptr": torch.tensor([0, 6]), "head": torch.tensor([0])}
    fixed = {name: value.to(device) for name, value in fixed.items()}

    def plain(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(dict(data), compute_force=True)
        return out["energy"].detach(), out["forces"].detach()

    graphed = graphed_forces(model)
    for _ in range(12):
        data = {**fixed, "positions": 2 * torch.rand(6, 3, device=device)}
        torch.testing.assert_close(graphed(data), plain({**data, "positions": data["positions"].clone()}))
    print(graphed.__wrapped__.graph_report())
    assert graphed.__wrapped__.graph_stats.replays >= 8
    return {"plain": lambda: plain(data), "graphs": lambda: graphed(data)}


if __name__ == "__main__":
    main()
