"""Texts as XLA:TPU (libtpu 0.0.42.1) writes them, shortened; the real compiler is in test_compilation.py."""

import pytest

from trainer.preflight import verdict
from trainer.preflight.compiler import MovedError
from trainer.preflight.verdict import Collective, Parameter

LOG = """\
I1130 00:49:00.852942   18430 deepsea_compiler_backend.cc:2127] XLA::TPU program HBM usage: 4.20G / 15.75G
I1130 00:49:00.852958   18430 deepsea_compiler_backend.cc:2171] Total hbm usage >= 4.72G:
    reserved        258.00M
    program           4.20G
    arguments       269.88M

Output size 196.38M; shares 196.37M with arguments.

I1130 00:49:00.852982   18430 deepsea_compiler_backend.cc:2175] Program sflag requirement 436B:
    HLO temp           180B (100.0% utilization: Unpadded (172B) Padded (172B), 4.4% fragmentation (8B))
Program hbm requirement 4.20G:
    global             512B
    scoped            1.35M
    HLO temp          4.09G (100.0% utilization: Unpadded (4.05G) Padded (4.05G), 1.1% fragmentation (48.18M))
    overlays        108.96M
Program vmem requirement 127.26M:
    HLO temp        112.00M (0.0% utilization: Unpadded (0B) Padded (0B), 100.0% fragmentation (112.00M))
"""
# What libtpu's API says of the same program: ResNet-50, 128 images a replica.
FIELDS = {
    "arguments": 282_984_448,
    "outputs": 205_916_672,
    "aliased": 205_913_088,
    "temporaries": 4_446_333_440,
    "code": 114_254_848,
    "flops": 2.874e12,
    "bytes_accessed": 5.65e10,
    "seconds": 92.0,
    "versions": {},
}


def module(layouts: str, aliases: str = "") -> str:
    return (
        f"HloModule a_inference_step__.9, is_scheduled=true, {aliases}entry_computation_layout={{({layouts})->f32[]}}\n"
    )


def test_memory_is_what_libtpu_adds_up_in_its_log():
    memory = verdict.read(FIELDS, module("u8[282984448]{0:T(1024)}"), LOG).memory
    assert memory.available == round(15.75 * 2**30)
    assert memory.reserved == 258 * 2**20
    # 4.72 GiB of the log, to the last digit that it has; fragmentation once.
    assert (memory.peak + memory.reserved) / 2**30 == pytest.approx(4.72, abs=0.005)
    assert memory.temporaries / 2**30 == pytest.approx(4.09, abs=0.005)


@pytest.mark.parametrize("line", ["program HBM usage", "reserved", "Program hbm requirement"])
def test_log_that_lacks_a_line_is_no_guess(line):
    log = "".join(kept for kept in LOG.splitlines(keepends=True) if line not in kept)
    with pytest.raises(MovedError, match="log"):
        verdict.read(FIELDS, module("u8[282984448]{0:T(1024)}"), log)


def test_layouts_that_do_not_add_up_are_no_guess():
    with pytest.raises(MovedError, match="282984448"):
        verdict.read(FIELDS, module("f32[1000]{0:T(1024)}"), LOG)


@pytest.mark.parametrize(
    "shape, on_device",
    [
        ("f32[1000]{0:T(1024)}", 1024 * 4),
        ("f32[]{:T(128)}", 128 * 4),
        ("f32[20,1000]{1,0:T(8,128)}", 24 * 1024 * 4),
        ("f32[20,1000]{0,1:T(8,128)}", 1000 * 128 * 4),  # the first dimension is the fastest
        ("u8[128,28,28,1]{0,2,3,1:T(8,128)(4,1)}", 28 * 1 * 32 * 128),
        ("bf16[3,3,64,64]{3,2,1,0:T(8,128)(2,1)}", 3 * 3 * 64 * 128 * 2),
        ("s64[2]{0:T(128)}", 128 * 8),
        ("pred[5]{0:T(512)}", 512),
        ("f8e4m3fn[16]{0}", 16),
    ],
)
def test_padding_of_parameters(shape, on_device):
    fields = FIELDS | {"arguments": on_device + 512}
    aliases = "input_output_alias={ {1}: (0, {}, may-alias) }, "
    read = verdict.read(fields, module(f"{shape}, /*index=1*/f32[]{{:T(128)}}", aliases), LOG)
    assert read.parameters == (Parameter(on_device, aliased=True), Parameter(512, aliased=False))


def test_collectives_count_once_each():
    text = """
ENTRY %main {
  %all-reduce.1 = (f32[3,3,1,32]{3,2,1,0:T(1,128)}, /*index=1*/f32[]{:T(128)S(1)}) all-reduce(%a, %b), channel_id=1
  %get-tuple-element.2 = f32[]{:T(128)} get-tuple-element(%all-reduce.1), index=1
  %all-reduce-start.3 = bf16[10]{0} all-reduce-start(%c), replica_groups={{0,1}}
  %all-reduce-done.3 = bf16[10]{0} all-reduce-done(%all-reduce-start.3)
  %all-gather-start.4 = (f32[4]{0}, f32[8]{0}) all-gather-start(%d), dimensions={0}
  %all-gather-done.4 = f32[8]{0} all-gather-done(%all-gather-start.4)
  ROOT %permute = (s32[2]{0}, s32[2]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%e)
}
"""
    assert verdict.collectives(text) == (
        Collective("all-gather", "f32", 1, 32),
        Collective("all-reduce", "bf16", 1, 20),
        Collective("all-reduce", "f32", 1, 4 * (288 + 1)),
        Collective("collective-permute", "s32", 1, 8),
    )


def test_out_of_memory_is_exact_where_the_log_is():
    error = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (24.48G) exceeds "
        "available HBM (15.75G)."
    )
    log = """\
E1130 00:47:10.004038   18192 deepsea_compiler_base.cc:3781] XLA:TPU compile permanent error. Ran out of memory in \
memory space hbm. Used 24.48G of 15.75G hbm. Exceeded hbm capacity by 8.73G. Memory usage report:

Memory Space: default (color=0)
Total bytes: 26281136128 (24.48GiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
  ------------------------------------------------------------
    1.59GiB(  5%);    1.59GiB;   1723678720;                2; bf16[1024,112,112,64], bf16[1024,114,114,64]
    3.12GiB( 10%);    1.53GiB;   3427090432;                1; bf16[1024,112,112,64]

"""
    found = verdict.refusal(error, log)
    assert (found.kind, found.used_bytes, found.available_bytes) == ("oom", 26_281_136_128, round(15.75 * 2**30))
    assert found.largest == (
        "1.59GiB: bf16[1024,112,112,64], bf16[1024,114,114,64]",
        "1.53GiB: bf16[1024,112,112,64]",
    )
    assert verdict.refusal(error, "").used_bytes == round(24.48 * 2**30)  # the error itself has two digits


def test_what_cannot_be_handed_to_the_compiler_is_no_verdict_on_tpus():
    error = """INVALID_ARGUMENT: CHLO => [StableHLO+Shape] => StableHLO failed;

Detailed error from MLIR: <unknown>:0: error: loc("XLA_Retvals"): failed to legalize operation 'mhlo.copy' that was ...
"""
    found = verdict.refusal(error, log="")
    assert (found.kind, found.operation) == ("other", "mhlo.copy")


def test_what_is_not_recognised_is_told_as_it_is():
    found = verdict.refusal("INTERNAL: Mosaic failed\nwith a long tail", log="")
    assert (found.kind, found.message) == ("other", "INTERNAL: Mosaic failed")
    assert verdict.last_words("I1130 00:49:00.8 18 file.cc:1] all is well") is None
    assert verdict.last_words("F1130 00:49:00.8 18 file.cc:1] Check failed: a == b").kind == "crash"
