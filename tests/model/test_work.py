"""Where attention costs a token as much as everything else."""

from msgspec.structs import replace

from atlas_core.conformance.decoder import SHAPES, DecoderShape, DenseDecoder, Mixture, record_decoder
from atlas_core.model.builder import record
from atlas_core.model.work import even_context

DENSE = DecoderShape("dense", 256, 4, 2, 64, 512, 300, 16, layers=3)
MIXTURE = replace(DENSE, mixture=Mixture(8, 2, 96))


def products(shape):
    """Operations of one token in the matrices of one layer before its feed-forward network, as written down in textbooks."""
    return 2 * shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)


def test_a_dense_decoder_by_hand():
    keys = 4 * DENSE.heads * DENSE.head_dim
    matrices = products(DENSE) + 6 * DENSE.hidden * DENSE.inner
    found = even_context(record_decoder(DENSE).program, 512, 128)
    # Norms, sums and SwiGLU are counted too; the head is not, since nobody wants logits of a prompt's tokens.
    assert matrices / keys <= found <= 1.1 * matrices / keys
    assert even_context(record_decoder(replace(DENSE, layers=1)).program, 512, 128) == found
    assert even_context(record_decoder(replace(DENSE, vocab=5000)).program, 512, 128) == found


def test_an_expert_for_few_tokens_takes_as_long_as_for_a_tile():
    program, keys = record_decoder(MIXTURE).program, 4 * MIXTURE.heads * MIXTURE.head_dim
    chosen = 6 * 2 * MIXTURE.hidden * 96
    many, few = even_context(program, 512, 128), even_context(program, 128, 128)
    # 512 tokens choose 1,024 of 8 experts, a tile each; of 128 tokens each expert has a quarter of one.
    assert abs(few - many - 3 * chosen / keys) <= 1
    assert even_context(program, 128, 1) == even_context(program, 4096, 128) == many


def test_layers_with_a_window_do_not_grow_with_the_context():
    shape = SHAPES[0]
    spec = record_decoder(shape).spec
    windowed = replace(spec, caches=tuple(replace(cache, kind="sliding", window=32) for cache in spec.caches))
    assert even_context(record(DenseDecoder(shape), windowed, record_decoder(shape).layout), 512, 128) is None
