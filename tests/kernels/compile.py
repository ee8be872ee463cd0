"""Goal: every kernel compiles for the cards that Terrace names, and none spills to local memory.

Method: NVRTC (its wheel; no GPU and no toolkit) makes a cubin of each kernels/*.cu for each
architecture with the options that the CUDA device uses; cuobjdump states what each kernel takes.
Prints a table; exits 1 on an error, a warning or a spill.
"""

import concurrent.futures
import ctypes
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLKIT = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
ARCHITECTURES = ["sm_80", "sm_90a"]
OPTIONS = [
    "--std=c++17",
    "--fmad=true",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    f"--include-path={ROOT / 'kernels'}",
    # For kernels that include cuda_bf16.h and the like; ours in common.cuh need no headers.
    f"--include-path={TOOLKIT / 'include'}",
    f"--include-path={TOOLKIT / 'include' / 'cccl'}",
]


def open_nvrtc():
    """The wheel's library, its builtins loaded first so that the bare name is found."""
    library = TOOLKIT / "lib"
    ctypes.CDLL(str(library / "libnvrtc-builtins.so.13.0"), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(library / "libnvrtc.so.13"), mode=ctypes.RTLD_GLOBAL)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def compile_cubin(nvrtc, source, architecture):
    """(cubin or None, log) of one file."""
    program = ctypes.c_void_p()

    def call(name, *arguments):
        code = getattr(nvrtc, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: {nvrtc.nvrtcGetErrorString(code).decode()}")

    def read(kind, handle):
        size = ctypes.c_size_t()
        call(f"nvrtcGet{kind}Size", handle, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{kind}", handle, room)
        return room.raw

    text, name = source.read_bytes(), str(source.relative_to(ROOT)).encode()
    call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    listed = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), listed)
    log = read("ProgramLog", program).rstrip(b"\0\n").decode()
    cubin = read("CUBIN", program) if code == 0 else None
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin, log


def resources(cubin_path):
    """{kernel: {REG, STACK, SHARED, LOCAL}} of a cubin."""
    command = [str(TOOLKIT / "bin" / "cuobjdump"), "--dump-resource-usage", str(cubin_path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\S+):\s+(REG:.*)", text)
    fields = re.compile(r"(REG|STACK|SHARED|LOCAL):(\d+)")
    return {
        name: {key: int(value) for key, value in fields.findall(line)} for name, line in found
    }


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    nvrtc = open_nvrtc()
    sources = sorted((ROOT / "kernels").glob("*.cu"))
    if not sources:
        sys.exit("no kernels/*.cu")
    faults = []
    work = [(source, architecture) for source in sources for architecture in ARCHITECTURES]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda item: compile_cubin(nvrtc, *item), work))
    print(f"{'kernel':<40} {'arch':<7} {'registers':>9} {'shared':>7} {'spill':>6}")
    for (source, architecture), (cubin, log) in zip(work, compiled):
        if log:
            print(log)
        if cubin is None or "warning" in log:
            faults.append(f"{source.name} for {architecture} does not compile cleanly")
        if cubin is None:
            continue
        path = out / f"{source.stem}.{architecture}.cubin"
        path.write_bytes(cubin)
        kernels = resources(path)
        if not kernels:
            faults.append(f"{source.name} for {architecture} holds no kernel")
        for kernel, used in sorted(kernels.items()):
            spill = used["STACK"] + used["LOCAL"]
            print(f"{kernel:<40} {architecture:<7} {used['REG']:>9} {used['SHARED']:>7} {spill:>6}")
            if spill:
                faults.append(f"{kernel} for {architecture} takes {spill} bytes of local memory")
    for fault in faults:
        print(f"kernels: {fault}", file=sys.stderr)
    sys.exit(1 if faults else 0)


main()
