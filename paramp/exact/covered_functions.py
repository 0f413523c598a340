"""torch's functions by what they need to have the same bits on every layout.

The names are ``__name__`` of the functions of torch, Tensor and torch.nn.functional; the in-place ones end with ``_``.
"""

from __future__ import annotations


def _names(text: str, in_place: bool = True) -> frozenset[str]:
    names = text.split()
    return frozenset([*names, *[f"{name}_" for name in names if in_place]])


_UNARY = """
    acos acosh arccos arccosh asin asinh arcsin arcsinh atan atanh arctan arctanh cos cosh sin sinh sinc tan tanh
    exp exp2 expm1 log log10 log1p log2 sigmoid logit rsqrt reciprocal erf erfc erfinv digamma lgamma i0
    silu gelu mish softplus elu celu selu hardswish hardsigmoid log_sigmoid sqrt leaky_relu hardshrink softshrink
    polygamma
"""
_SPECIAL = """
    digamma psi erf erfc erfcx erfinv exp2 expit expm1 gammaln i0 i0e i1 i1e log1p log_ndtr logit ndtr ndtri sinc
    entr xlogy xlog1py polygamma
"""
_SEVERAL = """
    pow float_power atan2 arctan2 hypot logaddexp logaddexp2 xlogy lerp addcmul addcdiv remainder fmod floor_divide
"""
ELEMENTWISE = _names(_UNARY) | _names(_SEVERAL) | {f"special_{name}" for name in _SPECIAL.split()}
"""Elementwise functions whose vectorised code may have other bits than their scalar code."""

ARITHMETIC = _names("add sub subtract rsub mul multiply div divide true_divide where maximum minimum clamp")
"""Exact elementwise functions of several operands; the first four with ``alpha`` are as :data:`ELEMENTWISE`."""

RANDOM = _names("bernoulli normal uniform random exponential geometric cauchy log_normal poisson") | _names(
    """
    rand rand_like randn randn_like randint randint_like randperm multinomial binomial native_dropout _standard_gamma
    _sample_dirichlet fractional_max_pool2d fractional_max_pool3d
    """,
    in_place=False,
)
"""Functions that draw from torch's generators."""

RANDOM_IN_TRAINING = {"alpha_dropout": 2, "feature_alpha_dropout": 2, "rrelu": 3, "rrelu_with_noise": 4}
RANDOM_IN_TRAINING |= {f"{name}_": index for name, index in RANDOM_IN_TRAINING.items()}
"""Those that do so in training only, and the index of that argument."""

SHAPES = _names(
    """
    __get__ __set__ __delete__ __getitem__ __setitem__ __len__ __contains__ __bool__ __int__ __float__ __index__
    __repr__ __format__ __hash__ __deepcopy__ __reduce_ex__
    size stride storage_offset dim ndimension numel nelement element_size data_ptr is_contiguous is_floating_point
    is_complex is_signed is_same_size get_device item tolist numpy type type_as to cpu cuda float double half bfloat16
    int long short byte char bool contiguous clone copy_ detach detach_ requires_grad_ retain_grad register_hook
    register_post_accumulate_grad_hook is_pinned pin_memory has_names is_shared untyped_storage
    view view_as reshape reshape_as flatten unflatten ravel squeeze squeeze_ unsqueeze unsqueeze_ transpose transpose_ t
    t_ permute movedim moveaxis swapaxes swapdims adjoint mT chunk split split_with_sizes tensor_split unbind narrow
    select select_copy index_select gather take_along_dim unfold diagonal as_strided cat concat concatenate stack hstack
    vstack dstack roll flip fliplr flipud rot90 tril tril_ triu triu_ pad constant_pad_nd repeat_interleave masked_fill
    masked_fill_ fill_ zero_ broadcast_tensors broadcast_shapes meshgrid atleast_1d atleast_2d atleast_3d
    empty empty_like empty_strided zeros zeros_like ones ones_like full full_like arange tensor as_tensor asarray
    scalar_tensor eye new_empty new_zeros new_ones new_full new_tensor device result_type promote_types finfo iinfo
    _set_grad_enabled resolve_conj resolve_neg one_hot tril_indices triu_indices from_numpy set_ is_nonzero
    all_gather_copy_in split_with_sizes_copy _foreach_copy_ chunk_cat _chunk_cat resize_ record_stream is_inference
    """,
    in_place=False,
)
"""Functions that compute nothing but shapes, copies and casts."""

EXACT = _names(
    """
    abs absolute neg negative positive square sign signbit relu relu6 hardtanh threshold round floor ceil trunc frac
    clip clamp_min clamp_max fmin fmax copysign nan_to_num isnan isinf isfinite isneginf isposinf isclose allclose equal
    eq ne lt le gt ge greater less logical_and logical_or logical_xor logical_not not_equal less_equal greater_equal
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__
    __lshift__ __rshift__ __iand__ __ior__ __ixor__ __invert__ heaviside deg2rad rad2deg linear
    """
)
"""Functions that are exact, or that layers of this package compute."""

LAST_DIM = {"softmax": 1, "log_softmax": 1, "_safe_softmax": 1}
"""Functions of rows, whose bits do not depend on how many there are, by a probe; the index of the argument ``dim``."""

PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "baddbmm"})
"""Products of batches of matrices."""

REFUSED = {
    "multi_head_attention_forward": "F.scaled_dot_product_attention in a module of your own",
    "_native_multi_head_attention": "F.scaled_dot_product_attention in a module of your own",
    "_transformer_encoder_layer_fwd": "F.scaled_dot_product_attention in a module of your own",
    "baddbmm_": "torch.baddbmm",
}
"""Functions that are never run, and what to use instead."""
