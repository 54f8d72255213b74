"""Sample arguments for every op that CUDA's autocast policy speaks of.

Each entry takes `a` and `b`, makers of tensors in two dtypes (`a(2, 3)` is a tensor of that shape), and gives the
positional arguments of the op's overload.
"""

from __future__ import annotations

import torch

LONG = torch.tensor([0, 1])


def square(a, _b):
    return (a(3, 3),)


def pair(a, b):
    return (a(3, 3), b(3, 3))


def conv(rank, *, transposed=False):
    def build(a, b):
        image, weight = a(1, 2, *[4] * rank), b(*((2, 3) if transposed else (3, 2)), *[2] * rank)
        return (image, weight)

    return build


def convolution(a, b):
    return (a(1, 2, 4, 4), b(3, 2, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def cell(gates):
    return lambda a, b: (a(2, 4), b(2, 3), b(3 * gates, 4), b(3 * gates, 3), b(3 * gates), b(3 * gates))


def rnn(gates, hidden=1):
    def build(a, b):
        hx = [b(1, 2, 3) for _ in range(hidden)] if hidden > 1 else b(1, 2, 3)
        params = [b(3 * gates, 4), b(3 * gates, 3), b(3 * gates), b(3 * gates)]
        return (a(5, 2, 4), hx, params, True, 1, 0.0, False, False, False)

    return build


def packed(gates, hidden=1):
    def build(a, b):
        args = rnn(gates, hidden)(a, b)
        return (a(4, 4), torch.tensor([2, 2]), *args[1:-1])

    return build


def resize(rank, *flags):
    return lambda a, _b: (a(1, 2, *[4] * rank), [6] * rank, *flags)


def definite(a, _b):
    return (a(1, 1).expand(3, 3) * torch.eye(3),)


def classes(a, _b):
    return (a(2, 3), LONG)


LOWER = {
    "_convolution.deprecated": lambda a, b: (*convolution(a, b), False, False, True),
    "_convolution": lambda a, b: (*convolution(a, b), False, False, True, True),
    "convolution": convolution,
    "conv1d": conv(1),
    "conv2d": conv(2),
    "conv3d": conv(3),
    "conv_tbc": lambda a, b: (a(4, 2, 3), b(3, 3, 3), b(3)),
    "conv_transpose1d": conv(1, transposed=True),
    "conv_transpose2d.input": conv(2, transposed=True),
    "conv_transpose3d.input": conv(3, transposed=True),
    "prelu": lambda a, b: (a(2, 3), b(3)),
    "addmm": lambda a, b: (a(2, 4), b(2, 3), a(3, 4)),
    "addmv": lambda a, b: (a(2), b(2, 3), a(3)),
    "addr": lambda a, b: (a(2, 3), b(2), a(3)),
    "matmul": pair,
    "einsum": lambda a, b: ("ij,jk->ik", [a(2, 3), b(3, 4)]),
    "mm": pair,
    "mv": lambda a, b: (a(2, 3), b(3)),
    "linalg_vecdot": pair,
    "linear": lambda a, b: (a(2, 3), b(4, 3), b(4)),
    "addbmm": lambda a, b: (a(2, 4), b(5, 2, 3), a(5, 3, 4)),
    "baddbmm": lambda a, b: (a(5, 2, 4), b(5, 2, 3), a(5, 3, 4)),
    "bmm": lambda a, b: (a(5, 2, 3), b(5, 3, 4)),
    "chain_matmul": lambda a, b: ([a(2, 3), b(3, 4), a(4, 2)],),
    "linalg_multi_dot": lambda a, b: ([a(2, 3), b(3, 4), a(4, 2)],),
    "lstm_cell": lambda a, b: (a(2, 4), [b(2, 3), b(2, 3)], b(12, 4), b(12, 3), b(12), b(12)),
    "gru_cell": cell(3),
    "rnn_tanh_cell": cell(1),
    "rnn_relu_cell": cell(1),
    "scaled_dot_product_attention": lambda a, b: (a(1, 2, 4, 8), b(1, 2, 4, 8), b(1, 2, 4, 8)),
    "lstm.input": rnn(4, hidden=2),
    "gru.input": rnn(3),
    "rnn_tanh.input": rnn(1),
    "rnn_relu.input": rnn(1),
    "lstm.data": packed(4, hidden=2),
    "gru.data": packed(3),
    "rnn_tanh.data": packed(1),
    "rnn_relu.data": packed(1),
}

FP32 = {
    **dict.fromkeys(
        ["acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"],
        square,
    ),
    **dict.fromkeys(["sinh", "tan", "softplus", "nuclear_norm", "pdist"], square),
    "pow.Tensor_Scalar": lambda a, _b: (a(3), 2.0),
    "pow.Tensor_Tensor": pair,
    "pow.Scalar": lambda a, _b: (2.0, a(3)),
    "layer_norm": lambda a, b: (a(2, 3), [3], b(3), b(3)),
    "native_layer_norm": lambda a, b: (a(2, 3), [3], b(3), b(3), 1e-5),
    "rms_norm": lambda a, b: (a(2, 3), [3], b(3)),
    "group_norm": lambda a, b: (a(2, 4, 3), 2, b(4), b(4)),
    "frobenius_norm.dim": lambda a, _b: (a(3, 3), [1]),
    "nuclear_norm.dim": lambda a, _b: (a(3, 3), [0, 1]),
    **dict.fromkeys(
        [
            *["cosine_similarity", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss"],
            *["mse_loss", "soft_margin_loss", "binary_cross_entropy_with_logits", "dist", "cdist"],
        ],
        pair,
    ),
    "poisson_nll_loss": lambda a, b: (a(3), b(3), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda a, b: (a(2, 3), b(2, 3), torch.ones(2)),
    "margin_ranking_loss": lambda a, b: (a(3), b(3), torch.ones(3)),
    "nll_loss": classes,
    "nll_loss2d": lambda a, _b: (a(2, 3, 1, 1), torch.zeros(2, 1, 1, dtype=torch.long)),
    "multilabel_margin_loss": lambda a, _b: (a(2), LONG),
    "triplet_margin_loss": lambda a, b: (a(2, 3), b(2, 3), b(2, 3)),
    "multi_margin_loss": classes,
    "renorm": lambda a, _b: (a(3, 3), 2, 0, 1.0),
    "logsumexp": lambda a, _b: (a(3, 3), [0]),
    "upsample_nearest1d": resize(1),
    "_upsample_nearest_exact1d": resize(1),
    "upsample_nearest2d": resize(2),
    "_upsample_nearest_exact2d": resize(2),
    "upsample_nearest3d": resize(3),
    "_upsample_nearest_exact3d": resize(3),
    "upsample_linear1d": resize(1, False),
    "upsample_bilinear2d": resize(2, False),
    "_upsample_bilinear2d_aa": resize(2, False),
    "upsample_trilinear3d": resize(3, False),
    "upsample_bicubic2d": resize(2, False),
    "_upsample_bicubic2d_aa": resize(2, False),
    "linalg_matrix_sqrth": definite,
}

OPTIONAL_DTYPE = {
    "prod": square,
    "prod.dim_int": lambda a, _b: (a(3, 3), 0),
    "softmax.int": lambda a, _b: (a(3, 3), 0),
    "log_softmax.int": lambda a, _b: (a(3, 3), 0),
    "cumprod": lambda a, _b: (a(3, 3), 0),
    "cumsum": lambda a, _b: (a(3, 3), 0),
    "linalg_vector_norm": square,
    "linalg_matrix_norm": lambda a, _b: (a(3, 3), 1),
    "linalg_matrix_norm.str_ord": square,
    "sum": square,
    "sum.dim_IntList": lambda a, _b: (a(3, 3), [0]),
}

APPENDED_DTYPE = {
    "norm.Scalar": square,
    "norm.ScalarOpt_dim": lambda a, _b: (a(3, 3), 2, [0]),
}

PROMOTE = {
    "addcdiv": lambda a, b: (a(3), b(3), a(3)),
    "addcmul": lambda a, b: (a(3), b(3), a(3)),
    "atan2": pair,
    "bilinear": lambda a, b: (a(2, 3), b(2, 4), a(5, 3, 4), b(5)),
    "cross": pair,
    "dot": lambda a, b: (a(3), b(3)),
    "vdot": lambda a, b: (a(3), b(3)),
    "grid_sampler": lambda a, b: (a(1, 2, 4, 4), b(1, 3, 3, 2), 0, 0, False),
    "index_put": lambda a, b: (a(3), [LONG], b(2)),
    "tensordot": lambda a, b: (a(3, 3), b(3, 3), [0], [0]),
    "scatter_add": lambda a, b: (a(3), 0, LONG, b(2)),
}

NO_CPU_KERNEL = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
"""CUDA kernels with no counterpart on a CPU tensor: nobody can call them there."""
