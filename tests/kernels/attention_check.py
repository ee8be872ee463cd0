"""Goal: on a GPU, that kernels/attention*.cu are right, repeats bit for bit, and how fast it is.

Method: the files are compiled by NVRTC for the card, launched with the geometry that
src/device/cuda/attention.rs uses, and compared with float64 over the same inputs: several widths,
packed sequences of any length, windows, grouped queries, both engines and the plain kernels. Then
B4 H28 S4096 D128 causal is timed with events, next to PyTorch's own attention.

python3 tests/kernels/attention_check.py        from the repository's root; a minute
"""

import ctypes
import math
import sys

import torch

# D: warps of forward, keys of a dq tile, queries of a dk/dv tile, columns of dk, dv a block
MMA = {
    32: (8, 64, 64, 32),
    64: (8, 64, 64, 64),
    80: (8, 64, 32, 80),
    96: (8, 64, 32, 96),
    128: (8, 32, 32, 128),
    256: (4, 16, 16, 128),
}
# D, of forward, dq, dk and dv: rows of a tile of what the unit does not consist of, tiles
WGMMA = {64: ((128, 4), (96, 5), (64, 8)), 128: ((128, 4), (64, 8), (64, 8))}
STAYING_BLOCKS, SHARED_IN_CACHE = 132, 32 << 20
ALL = 1 << 30


def library(*names):
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    sys.exit(f"none of {names} can be loaded")


def ok(result, call):
    if result != 0:
        sys.exit(f"{call}: error {result}")


def compiled(path):
    """The module of a source, for the card that torch uses."""
    nvrtc = library("libnvrtc.so.13", "libnvrtc.so", "libnvrtc.so.12")
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major == 9 else "")
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--fmad=true",
        "--ftz=false",
        "-Ikernels",
    ]
    program = ctypes.c_void_p()
    source = open(path, "rb").read()
    ok(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, path.encode(), 0, None, None),
        "create",
    )
    array = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    result = nvrtc.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if result != 0 or log.value.strip():
        print(log.value.decode()[:4000])
    ok(result, "compile")
    ok(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
    code = ctypes.create_string_buffer(size.value)
    ok(nvrtc.nvrtcGetCUBIN(program, code), "code")
    module = ctypes.c_void_p()
    ok(CUDA.cuModuleLoadData(ctypes.byref(module), code), "load")
    return module


def launch(name, grid, threads, shared, arguments):
    if name not in FUNCTIONS:
        function = ctypes.c_void_p()
        module = MODULES["plain" in name or "delta" in name]
        ok(CUDA.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
        FUNCTIONS[name] = function
    function = FUNCTIONS[name]
    if shared > 48 << 10:
        ok(CUDA.cuFuncSetAttribute(function, 8, shared), f"{shared} bytes of shared memory")
    words = []
    for x in arguments:
        if isinstance(x, ctypes.Array):
            words.append(x)
        elif isinstance(x, torch.Tensor):
            words.append(ctypes.c_uint64(x.data_ptr()))
        elif isinstance(x, float):
            words.append(ctypes.c_float(x))
        elif isinstance(x, tuple):
            words.append(ctypes.c_uint64(x[0]))
        else:
            words.append(ctypes.c_int32(x))
    pointers = (ctypes.c_void_p * len(words))(*[ctypes.addressof(w) for w in words])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    ok(CUDA.cuLaunchKernel(function, *grid, threads, 1, 1, shared, stream, pointers, None), name)


def tensor_map(x, rows):
    """Boxes of `rows` tokens of 64 columns of one head of x."""
    tokens, heads, dim = x.shape
    memory = (ctypes.c_uint64 * 32)()
    skipped = -ctypes.addressof(memory) % 128
    found = (ctypes.c_uint64 * 16).from_buffer(memory, skipped)
    words = lambda kind, *numbers: (kind * len(numbers))(*numbers)
    encoded = CUDA.cuTensorMapEncodeTiled(
        found,
        9,  # bf16
        3,
        ctypes.c_void_p(x.data_ptr()),
        words(ctypes.c_uint64, dim, heads, tokens),
        words(ctypes.c_uint64, dim * 2, heads * dim * 2),
        words(ctypes.c_uint32, 64, 1, rows),
        words(ctypes.c_uint32, 1, 1, 1),
        0,
        3,  # swizzle of 128 bytes
        2,
        0,
    )
    ok(encoded, "tensor map")
    return found


class Case:
    def __init__(self, dim, heads, kv_heads, window, bounds, dtype=torch.bfloat16, loud=1.0):
        self.dim, self.heads, self.kv_heads, self.bounds, self.dtype = (
            dim,
            heads,
            kv_heads,
            bounds,
            dtype,
        )
        self.tokens = bounds[-1]
        self.window = min(window, self.tokens)
        make = torch.Generator(device="cuda").manual_seed(7)
        normal = lambda h: torch.randn(self.tokens, h, dim, generator=make, device="cuda").to(dtype)
        self.q, self.do = (normal(heads) * loud).to(dtype), normal(heads)
        self.k, self.v = normal(kv_heads), normal(kv_heads)
        self.o, self.dq = torch.full_like(self.q, math.nan), torch.full_like(self.q, math.nan)
        self.dk, self.dv = torch.full_like(self.k, math.nan), torch.full_like(self.k, math.nan)
        self.lse = torch.full((heads, self.tokens), math.nan, device="cuda")
        self.delta = torch.full_like(self.lse, math.nan)
        self.problem = ((self.tokens,), heads, kv_heads, self.window, 1.0 / math.sqrt(dim))
        self.lists = {}

    def units(self, rows, keys):
        """Work list on the card, longest first within a section of tokens, and its length."""
        section = max(1, SHARED_IN_CACHE // self.shared_bytes(keys))
        if (rows, keys) not in self.lists:
            found = []
            for start, end in zip(self.bounds, self.bounds[1:]):
                length = end - start
                for first in range(0, length, rows):
                    last = min(length, first + rows)
                    if keys:
                        cost = min(length, last - 1 + self.window) - first
                    else:
                        cost = last - max(0, first + 1 - self.window)
                    found.append((start // section, -cost, start, length, first))
            found.sort(key=lambda x: x[:2])
            flat = [x for *_, start, length, first in found for x in (start, length, first, 0)]
            self.lists[rows, keys] = torch.tensor(flat, dtype=torch.int32, device="cuda"), len(
                found
            )
        return self.lists[rows, keys]

    def shared_bytes(self, keys):
        """Of a token: what blocks of a kernel over queries or keys share."""
        return 4 * self.dim * (self.heads // self.kv_heads if keys else 1)

    def staying(self, name, geometry, keys, inputs, rest):
        """Launches a wgmma kernel."""
        others, tiles = geometry
        rows, group = 128, self.heads // self.kv_heads
        heads, each = (self.kv_heads, 1) if keys else (self.heads, group)
        units, count = self.units(rows, keys)
        items = torch.cat([units.new_tensor([0, 0x7F800000, 0, 0]), units])
        section = max(1, SHARED_IN_CACHE // self.shared_bytes(keys) // self.tokens) * each
        boxes = (others, rows, rows, others) if keys else (rows, others, others, rows)
        row_tiles = 1 if name == "forward" else 2
        shared = (row_tiles * rows + tiles * others) * self.dim * 2 + 3072
        shared += 4 * tiles * others if keys else 0
        arguments = [tensor_map(x, box) for x, box in zip(inputs, boxes)]
        arguments += [*rest, items, count, heads, min(section, heads), *self.problem]
        name = f"attention_{name}_wgmma_{self.dim}"
        launch(name, (min(STAYING_BLOCKS, count * heads), 1, 1), 384, shared, arguments)

    def run_delta(self):
        name = "bf16" if self.dtype == torch.bfloat16 else "f32"
        grid = ((self.tokens + 3) // 4, self.heads, 1)
        launch(
            f"attention_delta_{name}",
            grid,
            128,
            0,
            [self.o, self.do, self.delta, self.dim, *self.problem],
        )

    def forward(self, engine):
        dim, inputs = self.dim, [self.q, self.k, self.v, self.o, self.lse]
        if engine == "plain":
            return self.plain("forward", self.heads, 4, inputs)
        if engine == "wgmma":
            return self.staying("forward", WGMMA[dim][0], False, inputs[:3], inputs[3:])
        warps, row = MMA[dim][0], dim * 2 + 16
        units, count = self.units(warps * 16, False)
        threads, name = warps * 32, f"attention_forward_{dim}"
        shared = 32 * warps * row + (16 * warps * row if dim > 128 else 0)
        launch(name, (count, self.heads, 1), threads, shared, [*inputs, units, *self.problem])

    def backward(self, engine):
        dim, inputs = self.dim, [self.q, self.k, self.v, self.do, self.lse, self.delta]
        self.run_delta()
        if engine == "plain":
            self.plain("backward_queries", self.heads, 4, [*inputs, self.dq])
            return self.plain("backward_keys", self.kv_heads, 8, [*inputs, self.dk, self.dv])
        if engine == "wgmma":
            _, queries, keys = WGMMA[dim]
            rest = inputs[4:]
            self.staying("backward_queries", queries, False, inputs[:4], [*rest, self.dq])
            rest = [*rest, self.dk, self.dv]
            return self.staying("backward_keys", keys, True, inputs[:4], rest)
        row = dim * 2 + 16
        _, keys, queries, columns = MMA[dim]
        shared = (128 + 4 * keys) * row, (128 + 4 * queries) * row + 16 * queries
        units, count = self.units(64, False)
        grid = (count, self.heads, 1)
        name = f"attention_backward_queries_{dim}"
        launch(name, grid, 128, shared[0], [*inputs, self.dq, units, *self.problem])
        units, count = self.units(64, True)
        grid = (count, self.kv_heads, dim // columns)
        name = f"attention_backward_keys_{dim}"
        launch(name, grid, 128, shared[1], [*inputs, self.dk, self.dv, units, *self.problem])

    def plain(self, name, heads, floats, tensors):
        bounds = torch.tensor(self.bounds, dtype=torch.int32, device="cuda")
        kind = "bf16" if self.dtype == torch.bfloat16 else "f32"
        arguments = [*tensors, bounds, len(self.bounds) - 1, self.dim, *self.problem]
        grid = ((self.tokens + 3) // 4, heads, 1)
        launch(f"attention_{name}_plain_{kind}", grid, 128, floats * self.dim * 4, arguments)

    def reference(self):
        """o, lse, dq, dk, dv in float64."""
        group = self.heads // self.kv_heads
        q, do = self.q.double(), self.do.double()
        k, v = (x.double().repeat_interleave(group, 1) for x in (self.k, self.v))
        o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
        lse = torch.zeros(self.heads, self.tokens, dtype=torch.float64, device="cuda")
        for start, end in zip(self.bounds, self.bounds[1:]):
            part = slice(start, end)
            qs, ks, vs, dos = (x[part].transpose(0, 1) for x in (q, k, v, do))
            at = torch.arange(end - start, device="cuda")
            behind = at[:, None] - at[None, :]
            hidden = (behind < 0) | (behind >= self.window)
            s = (qs @ ks.mT / math.sqrt(self.dim)).masked_fill(hidden, -math.inf)
            lse[:, part] = s.logsumexp(-1)
            p = (s - lse[:, part, None]).exp()
            os = p @ vs
            ds = p * (dos @ vs.mT - (os * dos).sum(-1, keepdim=True)) / math.sqrt(self.dim)
            for out, x in ((o, os), (dq, ds @ ks), (dk, ds.mT @ qs), (dv, p.mT @ dos)):
                out[part] = x.transpose(0, 1)
        fold = lambda x: x.view(self.tokens, self.kv_heads, group, self.dim).sum(2)
        return o, lse, dq, fold(dk), fold(dv)

    def outputs(self):
        return self.o, self.lse, self.dq, self.dk, self.dv


def check(engine, case):
    """Prints rms and largest difference, both over the rms of the reference."""
    case.forward(engine)
    case.backward(engine)
    torch.cuda.synchronize()
    first = [x.clone() for x in case.outputs()]
    case.forward(engine)
    case.backward(engine)
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(first, case.outputs()))
    limits = (1e-2, 0.15) if case.dtype == torch.bfloat16 else (1e-5, 1e-3)
    right, columns = same, []
    for got, wanted in zip(case.outputs(), case.reference()):
        scale = max(wanted.square().mean().sqrt().item(), 0.1)
        off = got.double() - wanted
        rms, top = off.square().mean().sqrt().item() / scale, off.abs().max().item() / scale
        right = right and rms < limits[0] and top < limits[1]
        columns.append(f"{rms:.0e}/{top:.0e}")
    window = "-" if case.window == case.tokens else case.window
    shape = f"D {case.dim:3} heads {case.heads}/{case.kv_heads} window {window:>4}"
    shape += f" tokens {case.tokens:5}"
    verdict = "ok" if right else "WRONG" if same else "NOT THE SAME TWICE"
    print(f"{engine:6} {shape}: {' '.join(columns)} {verdict}", flush=True)
    return right


def milliseconds(work, repeats=10):
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def timed(name, forward, both, flops):
    fore, whole = milliseconds(forward), milliseconds(both)
    print(
        f"{name:8} forward {fore:7.2f} ms {flops / fore / 1e9:5.0f} TFLOP/s   "
        f"forward+backward {whole:7.2f} ms {3.5 * flops / whole / 1e9:5.0f} TFLOP/s",
        flush=True,
    )


def time_all():
    batch, heads, length, dim = 4, 28, 4096, 128
    flops = 2 * batch * heads * length * length * dim
    print(f"B{batch} H{heads} S{length} D{dim} causal")
    case = Case(dim, heads, heads, ALL, [length * i for i in range(batch + 1)])
    for engine in ENGINES:
        timed(
            engine,
            lambda: case.forward(engine),
            lambda: (case.forward(engine), case.backward(engine)),
            flops,
        )
        for name, work in (("delta", case.run_delta), ("backward", lambda: case.backward(engine))):
            print(f"         {name} {milliseconds(work):.2f} ms")
    q, k, v, do = (
        x.view(batch, length, heads, dim).transpose(1, 2).detach()
        for x in (case.q, case.k, case.v, case.do)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    for name, backend in (
        ("torch FA", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                forward = lambda: attend(q, k, v, is_causal=True)
                timed(name, forward, lambda: torch.autograd.grad(forward(), (q, k, v), do), flops)
        except RuntimeError as error:
            print(f"{name}: {str(error)[:100]}")


torch.zeros(1, device="cuda")
CUDA = library("libcuda.so.1")
FUNCTIONS = {}
MODULES = [compiled(f"kernels/{name}.cu") for name in ("attention", "attention_plain")]
ENGINES = ["wgmma", "mma"] if torch.cuda.get_device_capability()[0] == 9 else ["mma"]


def main():
    print("root mean square/largest difference, over the rms of: o lse dq dk dv")
    packed = [0, 1, 130, 131, 700, 1212]
    cases = [
        ("mma", Case(64, 4, 2, ALL, packed)),
        ("mma", Case(96, 3, 1, 100, packed)),
        ("mma", Case(128, 4, 4, ALL, [0, 1024])),
        ("mma", Case(128, 14, 2, 257, packed, loud=3.0)),
        ("mma", Case(32, 2, 2, ALL, packed)),
        ("mma", Case(80, 2, 1, ALL, packed)),
        ("mma", Case(256, 4, 2, ALL, packed)),
        ("mma", Case(256, 2, 2, 1, [0, 300])),
        ("plain", Case(48, 4, 2, 90, packed)),
        ("plain", Case(64, 4, 2, 90, packed, torch.float32)),
        ("plain", Case(72, 3, 3, ALL, packed, torch.float32)),
    ]
    if "wgmma" in ENGINES:
        cases += [
            ("wgmma", Case(64, 4, 2, ALL, packed)),
            ("wgmma", Case(64, 2, 2, 100, packed)),
            ("wgmma", Case(128, 4, 4, ALL, [0, 1024])),
            ("wgmma", Case(128, 14, 2, ALL, packed, loud=3.0)),
            ("wgmma", Case(128, 4, 1, 257, packed)),
        ]
    results = [check(*case) for case in cases]
    time_all()
    print("all right" if all(results) else f"{results.count(False)} of {len(results)} WRONG")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
