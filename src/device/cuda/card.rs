//! What a card says of itself before a device is made of it.

use cudarc::driver::sys;

use super::driver::{Context, Fault, checked};
use super::library;
use crate::error::{Error, Result};

/// What a card says of itself.
pub struct Card {
    pub(super) raw: sys::CUdevice,
    ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// Oldest card that serves: bf16 in hardware, cp.async.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

impl Card {
    /// Asks card `ordinal`. [`Error::Device`] where there is none or it has no bf16; the libraries
    /// are opened first.
    pub fn read(ordinal: usize) -> Result<Card> {
        library::open()?;
        let label = format!("cuda:{ordinal}");
        let failed = |fault: Fault| fault.error(&label, "; `terrace doctor` lists the cards");
        let index = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let mut raw = 0;
        // SAFETY: the driver is started; `raw` outlives the call.
        let found = unsafe { sys::cuDeviceGet(&mut raw, index) };
        checked(found, || "cuDeviceGet".to_string()).map_err(failed)?;
        let mut name = [0u8; 256];
        // SAFETY: the buffer is 256 bytes long.
        let named = unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 256, raw) };
        checked(named, || "cuDeviceGetName".to_string()).map_err(failed)?;
        let name = std::ffi::CStr::from_bytes_until_nul(&name).unwrap_or_default();
        let attribute = |which: sys::CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: `value` outlives the call.
            let got = unsafe { sys::cuDeviceGetAttribute(&mut value, which, raw) };
            checked(got, || format!("cuDeviceGetAttribute {which:?}")).map_err(failed)?;
            Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
        };
        use sys::CUdevice_attribute as Attribute;
        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let name = name.to_string_lossy().into_owned();
        if capability < CAPABILITY_MIN {
            return Err(Error::Unsupported {
                what: "card",
                got: format!(
                    "{name}, compute capability {}.{}",
                    capability.0, capability.1
                ),
                supported: "8.0 and later, which compute in bf16".to_string(),
            });
        }
        let mut memory_bytes = 0;
        // SAFETY: the number outlives the call.
        let sized = unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, raw) };
        checked(sized, || "cuDeviceTotalMem".to_string()).map_err(failed)?;
        Ok(Card {
            raw,
            ordinal,
            name,
            capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory_bytes as u64,
        })
    }

    /// Bytes that are free on the card at this instant.
    pub fn free_bytes(&self) -> Result<u64> {
        let failed = |fault: Fault| fault.error(&format!("cuda:{}", self.ordinal), "");
        let primary = self.retain()?;
        primary.memory().map(|(free, _)| free).map_err(failed)
    }

    /// Its context; [`Error::Device`] where the card has no room for one.
    pub(super) fn retain(&self) -> Result<Context> {
        Context::retain(self.raw).map_err(|fault| {
            let remedy = "; a context takes about 0.5 GiB of the card: end what else uses it \
                          (nvidia-smi lists it), or use --device cpu";
            fault.error(&format!("cuda:{}", self.ordinal), remedy)
        })
    }
}

/// How many cards the driver sees.
pub fn card_count() -> Result<usize> {
    library::open()?;
    let mut count = 0;
    // SAFETY: the driver is started; `count` outlives the call.
    let counted = unsafe { sys::cuDeviceGetCount(&mut count) };
    checked(counted, || "cuDeviceGetCount".to_string()).map_err(|fault| fault.error("cuda", ""))?;
    Ok(usize::try_from(count).unwrap_or(0))
}
