"""Names of kernels tell who launched them; all but Triton's and those made up here were met on an H100."""

from __future__ import annotations

import pytest

from simplegraph.device import kernel_names
from simplegraph.device.kernel_names import launched_by_torch, readable

CAT = (
    "_ZN2at6native40_GLOBAL__N__0f1a8107_8_Shape_cu_49f7391c30CatArrayBatchedCopy_vectorizedINS1_10OpaqueTypeILj2EEEj"
    "Li2ELi128ELi1ELi16ELi8EEEvPcNS1_25CatArrInputTensorMetadataIT_T0_XT2_EXT3_EEENS1_16TensorSizeStrideIS8_Lj4EEEiS8_"
)
SPLIT = (
    "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EiffffLb0EfffLb1ELb0ELb0ELb0EEEvNS_18cublasSplitKParamsIT4_EEPKT2_PKT8_"
    "PT7_PT3_PKS2_SF_PKT9_S6_PSG_PvlPS2_PiSL_SL_SF_SF_SF_SF_SF_"
)
MAGMA = (
    "_Z20magma_sgemmEx_kernelIf13__nv_bfloat16S0_Lb0ELb1ELi6ELi4ELi6ELi3ELi4EEviii13BatchedTensoriS1_iS1_iS1_iiiPKT_S4_"
    "S2_S2_i18cublasLtEpilogue_tiPKvl"
)
FLASH = (
    "_ZN7cutlass13device_kernelIN5flash19FlashAttnFwdCombineIN4cute5tupleIJNS3_1CILi8EEENS5_ILi128EEEEEELi5ELi256ELi1E"
    "Lb0ELb1ENS_10bfloat16_tEfNS_4arch4Sm90EEEEEvNT_6ParamsE"
)
REDUCE = "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIN3c108BFloat16ENS0_9ArgMaxOpsIfEEjlLi4ELi4EEEEEvT1_"
GEMV = "_Z16gemmSN_TN_kernelIfLi128ELi16ELi2ELi4ELi4ELi4ELb1E30cublasGemvTensorStridedBatchedIKfES2_S0_IfEfEv"
OWN = "_ZN2my5scaleIfEEvPT_PKS1_S4_RKiPKcm"  # void my::scale<float>(float*, float const*, float const*, ...)


LIBRARIES = [
    *("sm90_xmma_gemm_f32", "nvjet_tst_64x8", "ampere_sgemm_128x64_tn", "cutlass_80_tensorop_s1688gemm"),
    *("_5x_cudnn_ampere_scudnn_winograd_128x128", "_Z23implicit_convolve_sgemmIffLi128EEviiiPKf"),
]


@pytest.mark.parametrize("kernel", [CAT, SPLIT, MAGMA, FLASH, REDUCE, GEMV, *LIBRARIES])
def test_kernels_of_torch_and_its_libraries_are_told(kernel: str) -> None:
    assert launched_by_torch(kernel)


@pytest.mark.parametrize(
    "kernel",
    [
        OWN,
        "_add_hidden",
        "flash_attn_fwd",
        "matmul_kernel",
        "triton_poi_0",
        "_ZN10flashinfer6decodeEPf",
        "_Z12attention_fwPf",
    ],
)
def test_kernels_of_users_are_not(kernel: str) -> None:
    assert not launched_by_torch(kernel)


def test_names_are_shown_as_they_were_written() -> None:
    assert readable(REDUCE) == "at::native::reduce_kernel"
    assert readable(MAGMA) == "magma_sgemmEx_kernel"
    assert readable(FLASH) == "cutlass::device_kernel"
    assert readable(OWN) == "my::scale"
    assert readable("_add_hidden") == "_add_hidden"
    assert readable("_Znonsense") == "_Znonsense"


def test_without_torchs_reader_of_cpp_names_they_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_names, "_demangle", str)
    readable.cache_clear()
    assert readable(REDUCE) == REDUCE
    readable.cache_clear()
