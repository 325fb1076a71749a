"""A cache as it lies in memory: where every element is, and back again."""

import numpy as np
import pytest

from atlas_core.contracts.ops import KVLayout
from atlas_core.ops.arrays import by_layer, laid_out
from atlas_core.vocab.dtype import DType

LAYERS, PAGES, HEADS, TOKENS, DIM = 3, 5, 2, 8, 4


@pytest.mark.parametrize("tile", [1, 4, 8])
@pytest.mark.parametrize("together", [False, True])
def test_every_element_lies_where_its_layout_says(tile, together):
    layout = KVLayout("toy", DType.F32, TOKENS, key_tile=tile, layers_together=together)
    cache = np.arange(LAYERS * PAGES * 2 * HEADS * TOKENS * DIM, dtype=np.float32)
    cache = cache.reshape(LAYERS, PAGES, 2, HEADS, TOKENS, DIM)
    memory = laid_out(cache, layout)
    flat = memory.reshape(-1)
    page_floats = layout.page_bytes(HEADS, DIM) // 4
    for layer, page, kv, head, token, dim in np.ndindex(cache.shape):
        number = page * LAYERS + layer if together else layer * PAGES + page
        within = (kv * HEADS + head) * TOKENS * DIM
        within += token // tile * tile * DIM + dim * tile + token % tile if kv == 0 else token * DIM + dim
        assert flat[number * page_floats + within] == cache[layer, page, kv, head, token, dim]
    np.testing.assert_array_equal(by_layer(memory, layout), cache)
