"""CUDA's autocast policy as data: which op is cast how.

Source: the lists `AT_FORALL_*` of `ATen/autocast_mode.h` in torch 2.6 to 2.15, and for the recurrent networks
`aten/src/ATen/native/cudnn/RNN.cpp`, which casts outside that header. A test compares them with the header and the
registrations of the installed build, so that a torch that moves an op is noticed. What a build does not cast on CUDA is
left out (`torch_internals.cast_on_cuda`).
"""

from __future__ import annotations

from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER_PRECISION: Final = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
"""Every fp32 and half input is cast to autocast's dtype."""

RECURRENT: Final = _names("""
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
""")
"""Every fp32 and half input is cast to fp16, also where autocast's dtype is bf16: `ATen/cudnn/AutocastRNN.cpp` names
`kHalf` (an H100 with torch 2.11 answers so: fixtures/golden)."""

FP32: Final = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
"""Every half input is cast to fp32."""

FP32_SET_OPT_DTYPE: Final = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""`dtype=torch.float32` is set where the caller gave none and the first input is eligible."""

FP32_APPEND_DTYPE: Final = _names("norm.Scalar norm.ScalarOpt_dim")
"""Redispatched to the overload that takes a dtype."""

PROMOTE: Final = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
"""Every eligible input is cast to fp32 if one of them is fp32, else to autocast's dtype."""

BANNED: Final = _names("binary_cross_entropy")
"""Raises: with a half sigmoid before it the loss is not safe."""

CUDNN_ONLY: Final = _names("cudnn_convolution cudnn_convolution_transpose _cudnn_rnn")
"""Registered for CUDA's key, the last in CUDA builds only, and never called on a CPU tensor."""

NAMED: Final = _names("""
    cumprod.dimname cumsum.dimname log_softmax.Dimname softmax.Dimname prod.dim_Dimname sum.dim_DimnameList
    norm.names_ScalarOpt_dim
""")
"""Cast up to torch 2.12, and replayed as they are: no kernel in Python can be given a named tensor."""

LATER: Final = _names("linalg_matrix_sqrth")
"""Not there before torch 2.14."""

SAME_ON_CPU: Final = _names("""
    _convolution.deprecated addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear matmul mm prelu scaled_dot_product_attention
    binary_cross_entropy_with_logits cdist cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d poisson_nll_loss
    smooth_l1_loss soft_margin_loss triplet_margin_loss linalg_matrix_sqrth
""")
"""The CPU's own kernel does what CUDA's does: it stays, with its speed and its weight cache."""

ALL: Final = LOWER_PRECISION | RECURRENT | FP32 | FP32_SET_OPT_DTYPE | FP32_APPEND_DTYPE | PROMOTE | BANNED
"""Every op that CUDA's policy speaks of."""
