"""Every instruction set gives the bits of the portable one, on any machine: kernels whose instructions this processor
lacks are compiled over tests/native/emulated/immintrin.h, which computes each intrinsic lane by lane."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reference.sets import SETS

ROOT = Path(__file__).parents[2]
CSRC, NATIVE = ROOT / "csrc", ROOT / "tests" / "native"
EMULATION = NATIVE / "emulated"

# As in CMakeLists.txt: the flags of each set, and what all of csrc is compiled with.
SET_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx512": [
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ],
}
COMMON_FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", f"-I{CSRC}"]
# What each source file asks for before it defines its set.
GUARDS = {"avx2": "__AVX2__", "avxvnni": "__AVXVNNI__", "avx512": "__AVX512VNNI__"}
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1"]


def compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", ""))
    for candidate in [command] if command else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(candidate[0]):
            return candidate
    pytest.skip(f"no C++ compiler: {command[0] if command else 'neither c++, g++ nor clang++'} was not found")


def call(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )


def compile_all(jobs: dict[Path, list[str | Path]]) -> None:
    """Runs compiler commands {object file: arguments}, a few at a time."""
    cxx = compiler()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda job: call([*cxx, *COMMON_FLAGS, *job[1], "-c", "-o", job[0]]), jobs.items())
    for result in results:
        if result.returncode:
            pytest.fail(f"{shlex.join(map(str, result.args))}\n{result.stdout}", pytrace=False)


def native_objects(folder: Path, extra: Sequence[str] = ()) -> dict[Path, list[str | Path]]:
    """The program and the sets that this processor has; of the others, the stubs that say so."""
    sources = [CSRC / f"{name}.cpp" for name in ("isa_portable", "dispatch", "repack", "gguf_types")]
    jobs: dict[Path, list[str | Path]] = {
        folder / f"{source.stem}.o": ["-O1", *extra, source] for source in [*sources, NATIVE / "check_sets.cpp"]
    }
    for name, flags in SET_FLAGS.items():
        jobs[folder / f"{name}.o"] = ["-O1", *(flags if name in SETS else []), *extra, CSRC / f"isa_{name}.cpp"]
    return jobs


def emulated_objects(
    folder: Path, names: Sequence[str], emulation: Path = EMULATION, extra: Sequence[str] = ()
) -> dict[Path, list[str | Path]]:
    return {
        folder / f"emulated_{name}.o": [
            *("-O0", f"-I{emulation}", f"-D{GUARDS[name]}", f"-Dkernels_{name}=emulated_{name}"),
            *extra,
            CSRC / f"isa_{name}.cpp",
        ]
        for name in names
    }


def link(objects: Sequence[Path], program: Path, extra: Sequence[str] = ()) -> Path:
    result = call([*compiler(), *extra, *objects, "-o", program])
    assert result.returncode == 0, result.stdout
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Object files by name."""
    if not CSRC.is_dir():
        pytest.skip("the kernels' sources (csrc/) are not here")
    folder = tmp_path_factory.mktemp("check_sets")
    jobs = native_objects(folder) | emulated_objects(folder, list(SET_FLAGS))
    compile_all(jobs)
    return {path.stem: path for path in jobs}


def test_every_kernel_of_every_set_gives_the_portable_bits(objects: dict[str, Path], tmp_path: Path) -> None:
    program = link(list(objects.values()), tmp_path / "check_sets")
    result = call([program, "1", "5"])
    assert result.returncode == 0, result.stdout
    table = (CSRC / "kernels.hpp").read_text().partition("struct KernelTable {")[2].partition("};")[0]
    functions = set(re.findall(r"\(\*(\w+)\)\(", table))
    assert {"linear_q", "attention"} < functions
    lines = [line for line in result.stdout.splitlines() if line.endswith(" numbers")]
    for name in [*(name for name in SETS if name != "portable"), *(f"{name} emulated" for name in SET_FLAGS)]:
        # "avx512 emulated  linear_q Q4_K     200 cases      11556 numbers"
        checked = [line[16:].split() for line in lines if line[:16].strip() == name]
        assert {words[0] for words in checked} == functions
        assert all(int(words[-2]) > 1000 for words in checked)


def faulty(objects: dict[str, Path], folder: Path, right: str, wrong: str) -> subprocess.CompletedProcess[str]:
    """The check with `right` replaced in what the AVX-512 set runs on."""
    header = (EMULATION / "immintrin.h").read_text()
    assert header.count(right) == 1
    (folder / "immintrin.h").write_text(header.replace(right, wrong))
    jobs = emulated_objects(folder, ["avx512"], emulation=folder)
    compile_all(jobs)
    others = [path for name, path in objects.items() if name != "emulated_avx512"]
    return call([link([*others, *jobs], folder / "check_sets"), "1", "5"])


def test_a_wrong_shift_is_found(objects: dict[str, Path], tmp_path: Path) -> None:
    result = faulty(objects, tmp_path, "uint16_t(a.u16[i] >> n)", "uint16_t(a.u16[i] >> (n > 1 ? n - 1 : n))")
    assert result.returncode == 1
    assert "DIFFERENT: avx512 emulated linear_q Q4_K" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "found_in"),
    [
        ("a.f32[i] > b.f32[i] ?", "!(a.f32[i] <= b.f32[i]) ?", "rope_store"),  # max of a NaN and a number
        ("std::fma(a.f32[i], b.f32[i], c.f32[i])", "a.f32[i] * b.f32[i] + c.f32[i]", "linear_q Q4_K"),
        ("int(std::nearbyint(std::ldexp(size, 10 - exponent)))", "int(std::ldexp(size, 10 - exponent))", "rope_store"),
        ("std::max(size > 0.f ? std::ilogb(size) : -14, -14)", "std::ilogb(size)", "rope_store"),
        ("const float r = std::nearbyint(x);", "const float r = std::round(x);", "quantize"),
        ("r < 2147483648.f ? int32_t(r) : INT32_MIN", "r < 2147483648.f ? int32_t(r) : 1", "quantize"),
        ("n > 31 ? 31u : n", "n > 16 ? 16u : n - 1", "linear_q Q"),
        ("a[2] * b[2] + a[3] * b[3])", "a[2] * b[2] + a[3] * uint8_t(b[3]))", "linear_q Q4_K"),
        ("return !(a <= b);", "return a > b;", "beats"),
        ("ldexp(float(mantissa), -24)", "ldexp(float(mantissa), -25)", "linear_q Q"),
    ],
)  # fmt: skip
def test_other_faults_are_found(
    objects: dict[str, Path], tmp_path: Path, right: str, wrong: str, found_in: str
) -> None:
    result = faulty(objects, tmp_path, right, wrong)
    assert result.returncode == 1, result.stdout
    assert f"DIFFERENT: avx512 emulated {found_in}" in result.stdout


@pytest.mark.slow
def test_no_kernel_reads_or_writes_outside_its_arrays(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}\n")
    built = call([*compiler(), *SANITIZERS, probe, "-o", tmp_path / "probe"])
    if built.returncode or call([tmp_path / "probe"]).returncode:
        pytest.skip("the compiler has no address and undefined-behaviour sanitizers")
    jobs = native_objects(tmp_path, SANITIZERS) | emulated_objects(tmp_path, list(SET_FLAGS), extra=SANITIZERS)
    compile_all(jobs)
    program = link(list(jobs), tmp_path / "check_sets", SANITIZERS)
    for seed in ("1", "2"):
        result = call([program, seed, "2"])
        assert result.returncode == 0, result.stdout[-5000:]
