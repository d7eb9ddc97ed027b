"""What operations do, by the names of JAX's primitives and of ATen's operators: one word for the same operation of both."""

from __future__ import annotations

from convert.programs.program import Operation

LAYOUT = "layout"  # no arithmetic: axes, copies and casts
_NAMES: dict[str, tuple[str, ...]] = {
    LAYOUT: (
        *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p", "convert_element_type"),
        *("stop_gradient", "stage", "optimization_barrier", "view", "_unsafe_view", "t", "permute", "expand", "unsqueeze"),
        *("clone", "detach", "alias", "contiguous", "_to_copy", "lift_fresh", "unflatten", "flatten", "to", "_reshape_alias"),
        *("movedim", "view_as", "expand_as", "_reshape_copy", "reduce_precision", "device_put", "pvary"),
    ),
    "part": ("slice", "dynamic_slice", "select", "split", "unsafe_split", "split_with_sizes", "chunk", "narrow", "unbind", "unstack", "rev", "flip"),
    "join": ("concatenate", "cat", "stack", "pad", "constant_pad_nd", "repeat", "tile", "roll"),
    "pick": ("gather", "embedding", "index", "index_select", "take", "index_put"),
    "multiply": ("mul", "multiply"),
    "divide": ("div", "true_divide"),
    "add": ("add", "add_any"),
    "subtract": ("sub", "rsub"),
    "negate": ("neg",),
    "power": ("pow", "integer_pow", "square"),
    "reciprocal": ("reciprocal",),
    "sqrt": ("sqrt",),
    "rsqrt": ("rsqrt",),
    "exp": ("exp", "exp2", "expm1"),
    "log": ("log", "log1p"),
    "tanh": ("tanh",),
    "sigmoid": ("logistic", "sigmoid"),
    "silu": ("silu",),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "softplus": ("softplus",),
    "elu": ("elu",),
    "erf": ("erf", "erfc"),
    "sin": ("sin",),
    "cos": ("cos",),
    "abs": ("abs",),
    "limit": ("max", "maximum", "min", "minimum", "clamp", "clamp_min", "clamp_max", "clip"),
    "mask": ("select_n", "where", "masked_fill"),
    "product": ("dot_general", "mm", "bmm", "matmul", "addmm", "baddbmm", "dot", "mv", "linear"),
    "convolution": ("conv_general_dilated", "convolution"),
    "sum": ("reduce_sum", "sum"),
    "mean": ("mean",),
    "largest": ("reduce_max", "amax"),
    "smallest": ("reduce_min", "amin"),
    "softmax": ("_softmax", "softmax", "_log_softmax"),
    "running sum": ("cumsum", "cumlogsumexp"),
    "sort": ("sort", "top_k", "topk", "argsort"),
    "pooling": ("max_pool2d_with_indices", "max_pool2d", "avg_pool2d", "reduce_window", "reduce_window_max", "reduce_window_sum"),
    "random": ("native_dropout", "bernoulli", "dropout", "random_bits", "rand_like", "random_bernoulli"),
    "resize": (
        *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
        *("upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "grid_sampler_2d"),
    ),
    "attention": ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
}  # fmt: skip
KINDS = {name: kind for kind, names in _NAMES.items() for name in names}
OF_ONE = {"max": "largest", "min": "smallest"}  # torch's, of one value; of two they limit one of them
ELEMENTWISE = {
    *("multiply", "divide", "add", "subtract", "negate", "power", "reciprocal", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid"),
    *("silu", "gelu", "relu", "softplus", "elu", "erf", "sin", "cos", "abs", "limit", "mask", "random"),
}  # fmt: skip

NO_FUNCTION = {"multiply", "divide", "add", "subtract", "negate", "power", "mask"}  # alone, they are no activation


def kind_of(operation: Operation) -> str:
    """Return the word for what an operation does; its own name where there is none."""
    name = operation.name
    if name in OF_ONE and len(operation.operands) == 1:
        return OF_ONE[name]
    return KINDS.get(name) or KINDS.get(name.removesuffix("_")) or name
