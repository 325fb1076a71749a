"""What Hopper runs otherwise than other NVIDIA machines."""

from atlas_core.contracts.ops import OpImplementation
from atlas_nvidia.implementations.base import ELEMENTS
from atlas_nvidia.implementations.moe import SORTED
from atlas_plugin_hopper.chains import chains
from atlas_plugin_hopper.experts import SortedByEngine
from atlas_plugin_hopper.hybrid import hybrids
from atlas_plugin_hopper.moe_chains import moe_chains
from atlas_plugin_hopper.narrow_head import heads
from atlas_plugin_hopper.prefill import TILES, WarpgroupPrefill
from atlas_plugin_hopper.prompt_chains import prompt_chains
from atlas_plugin_hopper.prompt_layers import layers
from atlas_plugin_hopper.prompts import products
from atlas_plugin_hopper.scaled import scaled
from atlas_plugin_hopper.shared_expert import SharedBeside
from atlas_plugin_hopper.skinny import skinny
from atlas_plugin_hopper.skinny_chains import skinny_chains


def implementations() -> list[OpImplementation]:
    """All of them; no two of one op accept one need with one rank, those of atlas_nvidia included."""
    attention = [WarpgroupPrefill(head_dim, element) for element in ELEMENTS for head_dim in TILES]
    experts = [SortedByEngine(op, element) for element in ELEMENTS for op in SORTED]
    shared = [SharedBeside(element) for element in ELEMENTS]
    chained = [*skinny_chains(), *chains(), *moe_chains(), *hybrids()]
    dense = [*products(), *scaled()]
    return [*attention, *dense, *layers(), *prompt_chains(), *experts, *shared, *skinny(), *chained, *heads()]
