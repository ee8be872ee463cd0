//! The file that keeps what a machine's hops do: `terrace-bench profile` writes it, plans read it.
//!
//! - Units are in the keys' names; a rate is never nothing, negative or without end.
//! - The file names its version and its machine. Another version is refused; another machine's is
//!   read, with a warning: a plan for a server may be made elsewhere.
//! - A store is found by its path, else by its file system.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::device::cuda;
use crate::error::{Error, Result, printable};
use crate::machine;
use crate::plan::DeviceProfile;
pub use crate::report::date_text;
use crate::schedule::simulate::{Rates, ZstdRates};

/// Of the file's keys and their meanings.
pub const VERSION: u32 = 1;
/// Bytes a second each way of a drive that nobody measured: a common NVMe drive.
pub const STORE_BYTES_PER_SECOND: f64 = 1.5e9;

const HEAD: &str = "# What the tiers of one machine do, measured by `terrace-bench profile`.\n\
                    # `terrace plan --profile FILE` and `memory.profile = \"FILE\"` read it.\n\n";

/// What a machine's hops do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// UTC.
    pub measured_at: String,
    /// Version of the program.
    pub terrace_version: String,
    /// Seconds that measuring took.
    pub seconds: f64,
    /// Where.
    pub machine: Identity,
    /// Host memory and cores.
    pub host: HostRates,
    /// The CPU device first, then cards.
    pub device: Vec<DeviceRates>,
    /// Directories that were measured.
    #[serde(default)]
    pub store: Vec<StoreRates>,
}

/// What tells machines apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The processor's model.
    pub cpu: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// All memory.
    pub memory_bytes: u64,
    /// Names of the cards.
    #[serde(default)]
    pub gpu: Vec<String>,
}

/// Host memory and cores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRates {
    /// Copied by all cores, more than the caches hold; each byte counts once.
    pub copy_bytes_per_second: f64,
    /// Read and written in place by all cores; each byte counts twice.
    pub stream_bytes_per_second: f64,
    /// AdamW by all cores.
    pub adamw_parameters_per_second: f64,
    /// xxh3-128 of extents by one core.
    pub checksum_bytes_per_second: f64,
    /// Level of the rates below.
    pub zstd_level: i32,
    /// Moment-like values, byte-shuffled, by one core; bytes before compression.
    pub zstd_compress_bytes_per_second: f64,
    /// Bytes after decompression.
    pub zstd_decompress_bytes_per_second: f64,
    /// Bytes after compression by bytes before.
    pub zstd_ratio: f64,
    /// Moment-like f32 values as spilled ones are compressed, by one core; bytes before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moments_encode_bytes_per_second: Option<f64>,
    /// Bytes after they were restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moments_decode_bytes_per_second: Option<f64>,
    /// Their bytes after compression by bytes before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moments_ratio: Option<f64>,
}

impl HostRates {
    /// Compression of spilled moments; what a profile of an earlier version lacks is assumed.
    fn zstd(&self) -> ZstdRates {
        let assumed = ZstdRates::ASSUMED;
        // Of four bytes one shrinks.
        let possible = |ratio: &f64| (0.75..=1.0).contains(ratio);
        ZstdRates {
            encode: self
                .moments_encode_bytes_per_second
                .unwrap_or(assumed.encode),
            decode: self
                .moments_decode_bytes_per_second
                .unwrap_or(assumed.decode),
            ratio: self.moments_ratio.filter(possible).unwrap_or(assumed.ratio),
        }
    }
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRates {
    /// `cpu`, or the card's name.
    pub name: String,
    /// The card's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub card: Option<usize>,
    /// Matrix products in the device's arithmetic.
    pub gemm_flops_per_second: f64,
    /// Attention, forward and backward, heads 128 wide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_flops_per_second: Option<f64>,
    /// Passes over activations between the products: bytes read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes_bytes_per_second: Option<f64>,
    /// Host to device.
    pub promote_bytes_per_second: f64,
    /// Device to host.
    pub demote_bytes_per_second: f64,
}

/// A directory of a store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreRates {
    /// The directory.
    pub path: PathBuf,
    /// Its file system.
    pub file_system: String,
    /// `io_uring` or `pread`.
    pub engine: String,
    /// Past the page cache.
    pub direct: bool,
    /// Bytes of the file that was measured.
    pub bytes: u64,
    /// Reads alone, checksums verified.
    pub read_bytes_per_second: f64,
    /// Writes alone.
    pub write_bytes_per_second: f64,
    /// Reads and writes at once as an update does them, both together.
    pub mixed_bytes_per_second: f64,
}

impl Identity {
    /// This machine.
    pub fn here() -> Identity {
        let count = cuda::card_count().unwrap_or(0);
        let cards = (0..count).filter_map(|ordinal| cuda::Card::read(ordinal).ok());
        Identity {
            cpu: machine::cpu_model(),
            cores: machine::cores(),
            memory_bytes: machine::memory_bytes(),
            gpu: cards.map(|card| card.name).collect(),
        }
    }

    /// How `self` differs from the machine at hand, if it does.
    fn difference(&self, here: &Identity) -> Option<String> {
        let text = |machine: &Identity| {
            let gpu = match &machine.gpu[..] {
                [] => "no GPU".to_string(),
                cards => cards.join(", "),
            };
            format!(
                "{}, {} cores, {gpu}",
                printable(&machine.cpu),
                machine.cores
            )
        };
        let same = (&self.cpu, self.cores, &self.gpu) == (&here.cpu, here.cores, &here.gpu);
        (!same).then(|| format!("measured on {}; this is {}", text(self), text(here)))
    }
}

impl Profile {
    /// Reads the file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Input`] for another version, or what is not as it is written.
    pub fn read(path: &Path) -> Result<Profile> {
        let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
            action: "read",
            path: path.to_path_buf(),
            source,
            remedy: "; `terrace-bench profile -o profile.toml` writes one".to_string(),
        })?;
        Profile::parse(&text, &path.display().to_string())
    }

    /// Reads the text of the file at `place`.
    ///
    /// # Errors
    /// As [`Profile::read`].
    pub fn parse(text: &str, place: &str) -> Result<Profile> {
        let remedy = "measure again: `terrace-bench profile -o profile.toml`";
        let refused = |error: toml::de::Error| {
            let line = error
                .span()
                .map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            let got = printable(&error.message().replace('\n', " "));
            Error::input(
                "profile",
                format!("{place}:{line}"),
                "a profile",
                got,
                remedy,
            )
        };
        let table: toml::Table = toml::from_str(text).map_err(refused)?;
        let version = table
            .get("version")
            .map_or("none".to_string(), ToString::to_string);
        if version != VERSION.to_string() {
            let expected = format!("version {VERSION}");
            return Err(Error::input(
                "profile",
                place,
                expected,
                printable(&version),
                remedy,
            ));
        }
        let mut profile: Profile = toml::from_str(text).map_err(refused)?;
        for (name, rate) in profile.rates_mut() {
            if !(rate.is_finite() && *rate > 0.0) {
                let place = format!("{place}: {name}");
                let expected = "a rate above 0";
                return Err(Error::input(
                    "profile",
                    place,
                    expected,
                    rate.to_string(),
                    remedy,
                ));
            }
        }
        Ok(profile)
    }

    /// The file's text.
    pub fn text(&self) -> String {
        let body = toml::to_string(self).expect("numbers, strings and tables are TOML");
        format!("{HEAD}{body}")
    }

    /// Whole numbers a second, and no more digits than mean anything.
    pub(super) fn round(&mut self) {
        let decimals = |value: f64, digits: i32| {
            let scale = 10f64.powi(digits);
            (value * scale).round() / scale
        };
        self.seconds = decimals(self.seconds, 1);
        self.host.zstd_ratio = decimals(self.host.zstd_ratio, 4);
        self.host.moments_ratio = self.host.moments_ratio.map(|ratio| decimals(ratio, 4));
        for (_, rate) in self.rates_mut() {
            *rate = rate.round().max(1.0);
        }
    }

    fn rates_mut(&mut self) -> Vec<(String, &mut f64)> {
        let host = &mut self.host;
        let mut rates = vec![
            ("host.copy".to_string(), &mut host.copy_bytes_per_second),
            ("host.stream".to_string(), &mut host.stream_bytes_per_second),
            (
                "host.adamw".to_string(),
                &mut host.adamw_parameters_per_second,
            ),
            (
                "host.checksum".to_string(),
                &mut host.checksum_bytes_per_second,
            ),
            (
                "host.zstd_compress".to_string(),
                &mut host.zstd_compress_bytes_per_second,
            ),
            (
                "host.zstd_decompress".to_string(),
                &mut host.zstd_decompress_bytes_per_second,
            ),
        ];
        let moments = [
            ("encode", &mut host.moments_encode_bytes_per_second),
            ("decode", &mut host.moments_decode_bytes_per_second),
        ];
        for (name, rate) in moments {
            let name = format!("host.moments_{name}");
            rates.extend(rate.as_mut().map(|rate| (name, rate)));
        }
        for device in &mut self.device {
            let name = &device.name;
            rates.push((format!("{name}: gemm"), &mut device.gemm_flops_per_second));
            if let Some(rate) = &mut device.attention_flops_per_second {
                rates.push((format!("{name}: attention"), rate));
            }
            if let Some(rate) = &mut device.passes_bytes_per_second {
                rates.push((format!("{name}: passes"), rate));
            }
            rates.push((
                format!("{name}: promote"),
                &mut device.promote_bytes_per_second,
            ));
            rates.push((
                format!("{name}: demote"),
                &mut device.demote_bytes_per_second,
            ));
        }
        for store in &mut self.store {
            let path = store.path.display();
            rates.push((format!("{path}: read"), &mut store.read_bytes_per_second));
            rates.push((format!("{path}: write"), &mut store.write_bytes_per_second));
            rates.push((format!("{path}: mixed"), &mut store.mixed_bytes_per_second));
        }
        rates
    }

    /// What was measured for a directory: by its path, else by its file system.
    pub fn store_rates(&self, path: &Path) -> Option<&StoreRates> {
        let real = |path: &Path| {
            let found = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path));
            found.unwrap_or(path.to_path_buf())
        };
        let wanted = real(path);
        let same = self.store.iter().find(|store| real(&store.path) == wanted);
        let system = |path: &Path| {
            let found = path
                .ancestors()
                .find_map(|place| std::fs::metadata(place).ok());
            found.map(|found| found.dev())
        };
        let beside = || {
            let device = system(&wanted)?;
            self.store
                .iter()
                .find(|store| store.path.exists() && system(&store.path) == Some(device))
        };
        same.or_else(beside)
    }

    /// Rates for a plan on `device` with directories and bytes of a store, and what a person should
    /// know of them. `file` is where this was read from.
    ///
    /// # Errors
    /// [`Error::Input`] if the device was not measured.
    pub fn rates(
        &self,
        file: &Path,
        device: &DeviceProfile,
        stores: &[(PathBuf, u64)],
    ) -> Result<(Rates, Vec<String>)> {
        let file = file.display();
        let mut notes = vec![format!("rates: {file}, measured {}", self.measured_at)];
        if let Some(difference) = self.machine.difference(&Identity::here()) {
            notes.push(format!("warning: {file}: {difference}"));
        }
        let found = self.device.iter().find(|known| known.card == device.card);
        let card = || self.device.iter().find(|known| known.card.is_some());
        let Some(found) = found.or_else(|| device.card.and_then(|_| card())) else {
            let names: Vec<&str> = self
                .device
                .iter()
                .map(|known| known.name.as_str())
                .collect();
            return Err(Error::input(
                "profile",
                file.to_string(),
                format!("rates of {}", device.name),
                format!("those of {}", names.join(", ")),
                "measure on the machine with the device, or leave memory.profile out",
            ));
        };
        let [read, write, mixed] = self.striped(stores, &mut notes);
        let rates = Rates {
            gemm: found.gemm_flops_per_second,
            // A profile of an earlier version has neither: what it leaves out costs as a product
            // does, or nothing.
            attention: found
                .attention_flops_per_second
                .unwrap_or(found.gemm_flops_per_second),
            passes: found.passes_bytes_per_second.unwrap_or(f64::INFINITY),
            promote: found.promote_bytes_per_second,
            demote: found.demote_bytes_per_second,
            store_read: read,
            store_write: write,
            store_mixed: mixed,
            adamw: self.host.adamw_parameters_per_second,
            shared_cores: device.card.is_none(),
            cores: u32::try_from(self.machine.cores).unwrap_or(u32::MAX).max(1),
            zstd: self.host.zstd(),
        };
        Ok((rates, notes))
    }

    /// Rates of all directories at once: extents are spread by the directories' rates, or by their
    /// bytes where one is not known, so all have moved their share when the slowest has.
    fn striped(&self, stores: &[(PathBuf, u64)], notes: &mut Vec<String>) -> [f64; 3] {
        let known: Vec<_> = stores
            .iter()
            .map(|(path, _)| self.store_rates(path))
            .collect();
        let measured = known
            .iter()
            .map(|store| Some(store.as_ref()?.mixed_bytes_per_second));
        let by_bytes = || stores.iter().map(|(_, bytes)| *bytes as f64).collect();
        let weights: Vec<f64> = measured.collect::<Option<_>>().unwrap_or_else(by_bytes);
        let all: f64 = weights.iter().sum();
        let mut rates = [f64::INFINITY; 3];
        for ((path, _), (known, weight)) in stores.iter().zip(known.iter().zip(&weights)) {
            let own = match known {
                Some(store) => [
                    store.read_bytes_per_second,
                    store.write_bytes_per_second,
                    store.mixed_bytes_per_second,
                ],
                None => {
                    notes.push(format!(
                        "warning: {} was not measured, {:.1} GB/s is assumed; \
                         add it: `terrace-bench profile --store {0}`",
                        path.display(),
                        STORE_BYTES_PER_SECOND / 1e9
                    ));
                    [STORE_BYTES_PER_SECOND; 3]
                }
            };
            let share = weight / all.max(1.0);
            for (rate, own) in rates.iter_mut().zip(own) {
                *rate = rate.min(own / share.max(1e-9));
            }
        }
        rates.map(|rate| {
            if rate.is_finite() {
                rate
            } else {
                STORE_BYTES_PER_SECOND
            }
        })
    }
}
