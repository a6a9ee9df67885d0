"""Pieces that the Hopper kernels share: tiles of shared memory, barriers, bounds, products in flight."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup's product
CONSUMERS = gl.constexpr(2)
HALF = gl.constexpr(64)  # columns of V in one product
ONES = gl.constexpr(8)


@gluon.jit
def flat(place, WIDTH: gl.constexpr, ROW_COUNT: gl.constexpr):
    """A [1, 1, ROW_COUNT, WIDTH] tile of shared memory as [ROW_COUNT, WIDTH]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROW_COUNT, WIDTH], place.dtype)
    return place._reinterpret(place.dtype, [ROW_COUNT, WIDTH], layout)


@gluon.jit
def barriers(PLACES: gl.constexpr, ARRIVALS: gl.constexpr):
    """[PLACES] barriers that complete after ARRIVALS arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(made.index(place), count=ARRIVALS)
    return made


@gluon.jit
def bounded(scores, row, key_start, sizes, VARIANT: gl.constexpr):
    """Scores with -inf where the key does not exist or the bounds of its row exclude it."""
    KEY_BLOCK: gl.constexpr = scores.shape[1]
    key = key_start + gl.arange(0, KEY_BLOCK, gl.SliceLayout(0, scores.type.layout))
    if VARIANT.right_bound:
        farthest = gl.minimum(row + (sizes.diagonal + sizes.right), sizes.key_count - 1)
        scores = gl.where(key[None, :] <= farthest[:, None], scores, float("-inf"))
    elif not VARIANT.whole_keys:
        scores = gl.where((key < sizes.key_count)[None, :], scores, float("-inf"))
    if VARIANT.left_bound:
        nearest = row + (sizes.diagonal - sizes.left)
        scores = gl.where(key[None, :] >= nearest[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def multiply(weights, values, WIDTH: gl.constexpr):
    """round(P) times WIDTH columns from shared memory, from zero; in flight until it is waited for."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    left = gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(left, values, gl.zeros([ROWS, WIDTH], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def added(total, rescale, part):
    """total * rescale + part, rounded once."""
    return total * gl.convert_layout(rescale, gl.SliceLayout(1, total.type.layout))[:, None] + part
