//! Matrix products by cublasLt: bf16 or f32 in, f32 arithmetic, bf16 or f32 out.
//!
//! - The algorithm of a product is the first that cublasLt's heuristic names for its shape,
//!   formats, 16-byte alignment and a fixed workspace: fixed by card and library, never by a clock
//!   or a plan. It is asked for once and kept.
//! - f32 inputs are multiplied in f32, never in TF32. Partial sums of a split product stay f32 and
//!   are added in a fixed order; a weight's gradient is added to its f32 accumulator (beta = 1).
//! - A bias is added in f32 before the one rounding of the result.
//!
//! cublasLt counts columns first: a row-major `[R, C]` is its column-major `[C, R]`, so y = x·wᵀ is
//! asked for as yᵀ = w·xᵀ.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use super::driver::{Fault, checked};
use super::{CudaDevice, WORKSPACE_BYTES, lock};
use crate::device::{Dtype, View};

/// Alignment that decides an algorithm; more changes nothing, so that a plan's offsets cannot.
const ALIGNMENT_MAX: u32 = 16;

/// Bytes of the longest bias that is copied to an aligned place.
pub(super) const BIAS_BYTES_MAX: u64 = 1 << 20;

/// Plans that are kept, of about 1 KiB each.
const PLANS_MAX: usize = 4096;

/// Products that a commit's metadata names, in some 100 bytes each.
const RECORDED_MAX: usize = 512;

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: partial sums of a split product in f32, in workspace.
const SPLIT_SUMS_IN_F32: u32 = 2;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T` of `cublasOperation_t`.
const AS_IT_IS: u32 = 0;
const TRANSPOSED: u32 = 1;

/// D = op(A)·op(B) + beta·D (+ bias), column-major: D `[m, n]`, inner size `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    m: u64,
    n: u64,
    k: u64,
    transpose_a: bool,
    transpose_b: bool,
    input: Dtype,
    output: Dtype,
    accumulate: bool,
    bias: bool,
    /// Bytes that A, B and D start on, at most [`ALIGNMENT_MAX`].
    alignment: [u32; 3],
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let side = |transposed| if transposed { 'T' } else { 'N' };
        let [a, b, d] = self.alignment;
        write!(
            f,
            "{} x {} x {} {}{} {:?} to {:?}{}{}, aligned to {a} {b} {d}",
            self.m,
            self.n,
            self.k,
            side(self.transpose_a),
            side(self.transpose_b),
            self.input,
            self.output,
            if self.accumulate { " added" } else { "" },
            if self.bias { " with bias" } else { "" },
        )
    }
}

/// A product's descriptors and its algorithm.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// Of A, B and D.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// cublasLt and the plans of all products so far.
pub(super) struct Gemm {
    library: sys::cublasLtHandle_t,
    plans: Mutex<Plans>,
}

/// Products of a run: sequences of other lengths make other products, so both maps have an end.
#[derive(Default)]
struct Plans {
    /// Emptied at [`PLANS_MAX`]: a plan follows from its product alone.
    kept: HashMap<Product, Plan>,
    /// The first [`RECORDED_MAX`] products with their algorithms, as text that runs can compare.
    recorded: BTreeMap<String, String>,
}

impl Plans {
    /// The plan of a product, made where it is not kept.
    fn of(&mut self, library: sys::cublasLtHandle_t, product: Product) -> Result<&Plan, Fault> {
        if self.kept.len() >= PLANS_MAX && !self.kept.contains_key(&product) {
            self.kept.clear();
        }
        match self.kept.entry(product) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let plan = place.insert(Plan::new(library, product)?);
                if self.recorded.len() < RECORDED_MAX {
                    let words = plan.algorithm.data.map(|word| format!("{word:x}"));
                    self.recorded.insert(product.to_string(), words.join(" "));
                }
                Ok(plan)
            }
        }
    }
}

// SAFETY: a cublasLt handle may be used from any thread whose context is current.
unsafe impl Send for Gemm {}
// SAFETY: calls with one cublasLt handle may come from several threads; plans are behind a lock.
unsafe impl Sync for Gemm {}

impl Gemm {
    /// cublasLt in the current context.
    pub(super) fn new() -> Result<Gemm, Fault> {
        let mut library = std::ptr::null_mut();
        // SAFETY: the library is present; `library` outlives the call.
        succeeded(unsafe { sys::cublasLtCreate(&mut library) }, || {
            "cublasLtCreate".to_string()
        })?;
        Ok(Gemm {
            library,
            plans: Mutex::default(),
        })
    }

    /// cublasLt's version, for reports.
    pub(super) fn version() -> usize {
        // SAFETY: the library is present.
        unsafe { sys::cublasLtGetVersion() }
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        lock(&self.plans).kept.clear();
        // SAFETY: made by `new`; the device settles before it drops this.
        let _ = unsafe { sys::cublasLtDestroy(self.library) };
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: made by `Plan::new`, destroyed once.
            let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
        }
        if !self.description.is_null() {
            // SAFETY: made by `Plan::new`, destroyed once.
            let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.description) };
        }
    }
}

/// A preference of cublasLt's search, destroyed when dropped.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    /// Algorithms that fit the workspace and the operands' alignment and keep partial sums in f32.
    fn new(product: Product) -> Result<Preference, Fault> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the handle's place outlives the call.
        let made = unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) };
        succeeded(made, || "cublasLtMatmulPreferenceCreate".to_string())?;
        let preference = Preference(raw);
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let [a, b, d] = product.alignment;
        preference.set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            WORKSPACE_BYTES,
        )?;
        let sums = SPLIT_SUMS_IN_F32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, sums)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, a)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, b)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, d)?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d)?;
        Ok(preference)
    }

    /// Sets an attribute; `T` is the attribute's own type: u64 for bytes of workspace, else u32.
    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: T,
    ) -> Result<(), Fault> {
        let place = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the preference is live; the value outlives the call, which copies it.
        let set = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, place, size_of::<T>())
        };
        succeeded(set, || {
            format!("cublasLtMatmulPreferenceSetAttribute {attribute:?}")
        })
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `cublasLtMatmulPreferenceCreate`, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

impl Plan {
    fn new(library: sys::cublasLtHandle_t, product: Product) -> Result<Plan, Fault> {
        let mut plan = Plan {
            description: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        plan.make_description(product)?;
        plan.make_layouts(product)?;
        plan.algorithm = plan.choose(library, product)?;
        Ok(plan)
    }

    fn make_description(&mut self, product: Product) -> Result<(), Fault> {
        let f32_sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let f32_scale = sys::cudaDataType_t::CUDA_R_32F;
        let place = &mut self.description;
        // SAFETY: the handle's place outlives the call.
        let made = unsafe { sys::cublasLtMatmulDescCreate(place, f32_sums, f32_scale) };
        succeeded(made, || format!("cublasLtMatmulDescCreate of {product:?}"))?;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let operation = |transposed| if transposed { TRANSPOSED } else { AS_IT_IS };
        let epilogue = if product.bias {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32
        } else {
            sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_DEFAULT as u32
        };
        let (a, b) = (
            operation(product.transpose_a),
            operation(product.transpose_b),
        );
        self.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, a)?;
        self.describe(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, b)?;
        self.describe(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)
    }

    fn make_layouts(&mut self, product: Product) -> Result<(), Fault> {
        let Product { m, n, k, .. } = product;
        let turned = |transposed: bool, rows, columns| {
            if transposed {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let shapes = [
            (turned(product.transpose_a, m, k), product.input),
            (turned(product.transpose_b, k, n), product.input),
            ((m, n), product.output),
        ];
        for (place, ((rows, columns), dtype)) in self.layouts.iter_mut().zip(shapes) {
            let (kind, stride) = (data_type(dtype), rows.cast_signed());
            // SAFETY: the handle's place outlives the call.
            let made =
                unsafe { sys::cublasLtMatrixLayoutCreate(place, kind, rows, columns, stride) };
            succeeded(made, || {
                format!("cublasLtMatrixLayoutCreate of {product:?}")
            })?;
        }
        Ok(())
    }

    /// Sets an attribute of the description; `T` is the attribute's own type.
    fn describe<T>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> Result<(), Fault> {
        let place = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: the description is live; the value outlives the call, which copies it.
        let set = unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.description, attribute, place, size_of::<T>())
        };
        succeeded(set, || {
            format!("cublasLtMatmulDescSetAttribute {attribute:?}")
        })
    }

    /// The heuristic's first algorithm.
    fn choose(
        &self,
        library: sys::cublasLtHandle_t,
        product: Product,
    ) -> Result<sys::cublasLtMatmulAlgo_t, Fault> {
        let preference = Preference::new(product)?;
        let mut found = sys::cublasLtMatmulHeuristicResult_t {
            algo: self.algorithm,
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        let [la, lb, ld] = self.layouts;
        // SAFETY: all handles are live; one result has room for one.
        let asked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                library,
                self.description,
                la,
                lb,
                ld,
                ld,
                preference.0,
                1,
                &mut found,
                &mut count,
            )
        };
        let call = || format!("cublasLtMatmulAlgoGetHeuristic of {product:?}");
        succeeded(asked, call)?;
        succeeded(found.state, call)?;
        Ok(found.algo)
    }
}

/// Addresses of one use of a product.
#[derive(Clone, Copy)]
struct Operands {
    a: u64,
    b: u64,
    d: u64,
    bias: Option<u64>,
}

impl CudaDevice {
    /// The first products met, a bounded number, with their algorithms.
    pub fn products(&self) -> BTreeMap<String, String> {
        lock(&self.gemm.plans).recorded.clone()
    }

    pub(in crate::device) fn linear_forward(
        &self,
        x: View,
        w: View,
        bias: Option<View>,
        y: View,
        k: u64,
        accumulate: bool,
    ) {
        let (t, n) = (rows_of(x.count, k, "x"), rows_of(w.count, k, "w"));
        assert_eq!(y.count, t * n, "y is [T, N]");
        assert_eq!(x.dtype, w.dtype, "x and w have one format");
        if let Some(bias) = bias {
            assert_eq!(bias.count, n, "bias is [N]");
            assert_eq!(bias.dtype, y.dtype, "bias in y's format");
        }
        let product = Product {
            m: n,
            n: t,
            k,
            transpose_a: true,
            transpose_b: false,
            input: x.dtype,
            output: y.dtype,
            accumulate,
            bias: bias.is_some(),
            alignment: [0; 3],
        };
        self.multiply(product, w, x, y, bias);
    }

    pub(in crate::device) fn linear_backward_input(
        &self,
        dy: View,
        w: View,
        dx: View,
        k: u64,
        accumulate: bool,
    ) {
        let (t, n) = (rows_of(dx.count, k, "dx"), rows_of(w.count, k, "w"));
        assert_eq!(dy.count, t * n, "dy is [T, N]");
        assert_eq!(dy.dtype, w.dtype, "dy and w have one format");
        let product = Product {
            m: k,
            n: t,
            k: n,
            transpose_a: false,
            transpose_b: false,
            input: dy.dtype,
            output: dx.dtype,
            accumulate,
            bias: false,
            alignment: [0; 3],
        };
        self.multiply(product, w, dy, dx, None);
    }

    pub(in crate::device) fn linear_backward_weight(&self, dy: View, x: View, dw: View, k: u64) {
        let (t, n) = (rows_of(x.count, k, "x"), rows_of(dw.count, k, "dw"));
        assert_eq!(dy.count, t * n, "dy is [T, N]");
        assert_eq!(dy.dtype, x.dtype, "dy and x have one format");
        assert_eq!(dw.dtype, Dtype::F32, "gradients of weights are f32");
        let product = Product {
            m: k,
            n,
            k: t,
            transpose_a: false,
            transpose_b: true,
            input: x.dtype,
            output: dw.dtype,
            accumulate: true,
            bias: false,
            alignment: [0; 3],
        };
        self.multiply(product, x, dy, dw, None);
    }

    /// D = op(A)·op(B) (+ D) (+ bias); nothing where a size is zero.
    fn multiply(&self, mut product: Product, a: View, b: View, d: View, bias: Option<View>) {
        super::assert_apart(&[d], &[a, b]);
        if product.m == 0 || product.n == 0 || product.k == 0 {
            return;
        }
        let mut operands = Operands {
            a: self.pointer(a),
            b: self.pointer(b),
            d: self.pointer(d),
            bias: bias.map(|bias| self.pointer(bias)),
        };
        let alignment = |address: u64| 1 << address.trailing_zeros().min(ALIGNMENT_MAX.ilog2());
        product.alignment = [operands.a, operands.b, operands.d].map(alignment);
        self.attempt(|| {
            if let (Some(at), Some(bias)) = (operands.bias, bias)
                && alignment(at) < ALIGNMENT_MAX
            {
                operands.bias = Some(self.aligned_bias(at, bias.bytes())?);
            }
            let mut plans = lock(&self.gemm.plans);
            let plan = plans.of(self.gemm.library, product)?;
            self.run_plan(product, plan, operands)
        });
    }

    /// Copies a bias behind the workspace, in the stream's order: epilogues read 16 bytes at once.
    fn aligned_bias(&self, at: u64, bytes: u64) -> Result<u64, Fault> {
        assert!(
            bytes <= BIAS_BYTES_MAX,
            "{bytes} bytes of bias, at most {BIAS_BYTES_MAX}"
        );
        let place = self.workspace(WORKSPACE_BYTES) + WORKSPACE_BYTES;
        // SAFETY: both ranges are live; the stream keeps the place's users in order.
        let copied = unsafe {
            cudarc::driver::sys::cuMemcpyDtoDAsync_v2(place, at, bytes as usize, self.stream().0)
        };
        checked(copied, || format!("cuMemcpyDtoDAsync of {bytes} bytes"))?;
        Ok(place)
    }

    fn run_plan(&self, product: Product, plan: &Plan, operands: Operands) -> Result<(), Fault> {
        if let Some(bias) = operands.bias {
            let pointer = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            plan.describe(pointer, bias)?;
        }
        let alpha = 1.0f32;
        let beta = if product.accumulate { 1.0f32 } else { 0.0 };
        let [la, lb, ld] = plan.layouts;
        // SAFETY: handles are live; operands are ranges of the arena of the layouts' sizes, in
        // bounds by `pointer`, apart by `assert_apart` and by the schedule; the workspace is this
        // stream's.
        let multiplied = unsafe {
            sys::cublasLtMatmul(
                self.gemm.library,
                plan.description,
                std::ptr::from_ref(&alpha).cast(),
                operands.a as *const c_void,
                la,
                operands.b as *const c_void,
                lb,
                std::ptr::from_ref(&beta).cast(),
                operands.d as *const c_void,
                ld,
                operands.d as *mut c_void,
                ld,
                &plan.algorithm,
                self.workspace(WORKSPACE_BYTES) as *mut c_void,
                WORKSPACE_BYTES as usize,
                self.stream().0.cast(),
            )
        };
        succeeded(multiplied, || {
            format!("cublasLtMatmul of {product:?}, {WORKSPACE_BYTES} bytes of workspace")
        })
    }
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F32 => sys::cudaDataType_t::CUDA_R_32F,
        Dtype::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
    }
}

fn rows_of(count: u64, width: u64, what: &str) -> u64 {
    assert!(
        width > 0 && count.is_multiple_of(width),
        "{what} has {count} elements, rows of {width}"
    );
    count / width
}

fn succeeded(status: cublasStatus_t, call: impl FnOnce() -> String) -> Result<(), Fault> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Fault {
        call: call(),
        message: format!("{status:?}"),
    })
}
