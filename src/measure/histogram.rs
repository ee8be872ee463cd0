//! Latencies as counts in logarithmic buckets, with the exact minimum, maximum, mean and deviation.
//!
//! - 64 buckets between two powers of two: a percentile is within 1/128 of the latency itself.
//! - Adding is one index and a few sums; memory is fixed; histograms of several threads add up.

/// Bits of a value that choose its bucket.
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = (64 - BUCKET_BITS as usize + 1) << BUCKET_BITS;

/// Percentiles that reports show.
pub const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Nanoseconds, counted.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    min: u64,
    max: u64,
    mean: f64,
    /// Sum of squared differences from the mean.
    spread: f64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram {
            counts: vec![0; BUCKETS],
            count: 0,
            min: u64::MAX,
            max: 0,
            mean: 0.0,
            spread: 0.0,
        }
    }
}

fn bucket(value: u64) -> usize {
    let Some(shift) = (63 - (value | 1).leading_zeros()).checked_sub(BUCKET_BITS) else {
        return value as usize;
    };
    let within = (value >> shift) as usize - (1 << BUCKET_BITS);
    ((shift as usize + 1) << BUCKET_BITS) + within
}

/// The values of a bucket: its least, and the least of the next.
fn range(bucket: usize) -> (u64, u64) {
    let group = bucket >> BUCKET_BITS;
    if group == 0 {
        return (bucket as u64, bucket as u64 + 1);
    }
    let within = (bucket & ((1 << BUCKET_BITS) - 1)) as u64 + (1 << BUCKET_BITS);
    let shift = group as u32 - 1;
    let low = within << shift;
    (low, low.saturating_add(1 << shift))
}

impl Histogram {
    /// Adds a latency in nanoseconds.
    pub fn add(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.count += 1;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        let difference = value as f64 - self.mean;
        self.mean += difference / self.count as f64;
        self.spread += difference * (value as f64 - self.mean);
    }

    /// Adds all that `other` holds.
    pub fn merge(&mut self, other: &Histogram) {
        if other.count == 0 {
            return;
        }
        let (a, b) = (self.count as f64, other.count as f64);
        let difference = other.mean - self.mean;
        self.mean += difference * b / (a + b);
        self.spread += other.spread + difference * difference * a * b / (a + b);
        self.count += other.count;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        for (to, from) in self.counts.iter_mut().zip(&other.counts) {
            *to += from;
        }
    }

    /// How many were added.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The least; 0 of none.
    pub fn min(&self) -> u64 {
        if self.count == 0 { 0 } else { self.min }
    }

    /// The greatest; 0 of none.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The mean; 0 of none.
    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// Standard deviation of a sample; 0 of fewer than two.
    pub fn deviation(&self) -> f64 {
        if self.count < 2 {
            return 0.0;
        }
        (self.spread.max(0.0) / (self.count - 1) as f64).sqrt()
    }

    /// The latency that `percent` of all do not exceed: the middle of its bucket; 0 of none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = ((percent / 100.0 * self.count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let (low, high) = range(index);
                return (low + (high - low) / 2).clamp(self.min(), self.max);
            }
        }
        0
    }

    /// How many are below `value`, to the accuracy of a bucket.
    pub fn below(&self, value: u64) -> u64 {
        self.counts[..bucket(value)].iter().sum()
    }

    /// Counts between `per_octave` equal steps of each doubling, from the least latency's step to
    /// the greatest's: (from, to, count). `per_octave` is a power of two up to 64.
    pub fn bars(&self, per_octave: usize) -> Vec<(u64, u64, u64)> {
        if self.count == 0 {
            return Vec::new();
        }
        let joined = (1usize << BUCKET_BITS) / per_octave.clamp(1, 1 << BUCKET_BITS);
        let (first, last) = (bucket(self.min) / joined, bucket(self.max) / joined);
        (first..=last)
            .map(|bar| {
                let from = range(bar * joined).0;
                let to = range((bar + 1) * joined - 1).1;
                let count = self.counts[bar * joined..(bar + 1) * joined].iter().sum();
                (from, to, count)
            })
            .collect()
    }
}

/// Bytes by time since the start, in intervals that double when there are too many.
#[derive(Clone, Debug)]
pub struct Series {
    /// Milliseconds of an interval.
    pub interval_ms: u64,
    /// Bytes of each interval.
    pub bytes: Vec<u64>,
}

const INTERVALS_MAX: usize = 4096;

impl Default for Series {
    fn default() -> Series {
        Series {
            interval_ms: 100,
            bytes: Vec::new(),
        }
    }
}

impl Series {
    /// Adds what finished `at_ms` after the start.
    pub fn add(&mut self, at_ms: u64, bytes: u64) {
        while at_ms / self.interval_ms >= INTERVALS_MAX as u64 {
            self.coarsen();
        }
        let index = (at_ms / self.interval_ms) as usize;
        if self.bytes.len() <= index {
            self.bytes.resize(index + 1, 0);
        }
        self.bytes[index] += bytes;
    }

    fn coarsen(&mut self) {
        self.interval_ms *= 2;
        let pairs = self.bytes.chunks(2).map(|pair| pair.iter().sum());
        self.bytes = pairs.collect();
    }

    /// Adds another that began at the same time.
    pub fn merge(&mut self, other: &Series) {
        let mut other = other.clone();
        while self.interval_ms < other.interval_ms {
            self.coarsen();
        }
        while other.interval_ms < self.interval_ms {
            other.coarsen();
        }
        if self.bytes.len() < other.bytes.len() {
            self.bytes.resize(other.bytes.len(), 0);
        }
        for (to, from) in self.bytes.iter_mut().zip(&other.bytes) {
            *to += from;
        }
    }

    /// Bytes a second in each interval of at least `interval_ms`, the last partial one left out.
    pub fn rates(&self, interval_ms: u64) -> Vec<f64> {
        let mut wide = self.clone();
        let joined = interval_ms.div_ceil(wide.interval_ms).max(1);
        let seconds = (joined * wide.interval_ms) as f64 / 1e3;
        let whole = wide.bytes.len().saturating_sub(1) / joined as usize * joined as usize;
        wide.bytes.truncate(whole);
        let sums = wide.bytes.chunks(joined as usize);
        sums.map(|chunk| chunk.iter().sum::<u64>() as f64 / seconds)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_tile_all_values() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (low, high) = range(index);
            assert_eq!(low, next, "{index}");
            assert_eq!(bucket(low), index);
            assert_eq!(bucket(high - 1), index);
            next = high;
            if high == u64::MAX {
                break;
            }
        }
    }

    #[test]
    fn percentiles_are_within_a_hundredth_and_merging_is_adding() {
        let values: Vec<u64> = (1..=100_000u64).map(|i| i * i % 7_919_003 + 50).collect();
        let mut sorted = values.clone();
        sorted.sort_unstable();
        let (mut all, mut left, mut right) = (
            Histogram::default(),
            Histogram::default(),
            Histogram::default(),
        );
        for (index, value) in values.iter().enumerate() {
            all.add(*value);
            let half = if index % 3 == 0 {
                &mut left
            } else {
                &mut right
            };
            half.add(*value);
        }
        left.merge(&right);
        for percent in PERCENTILES {
            let exact = sorted[(percent / 100.0 * 1e5) as usize - 1] as f64;
            let got = all.percentile(percent) as f64;
            assert!((got / exact - 1.0).abs() < 0.01, "{percent}: {got} {exact}");
            assert_eq!(left.percentile(percent), all.percentile(percent));
        }
        assert!((left.mean() / all.mean() - 1.0).abs() < 1e-9);
        assert!((left.deviation() / all.deviation() - 1.0).abs() < 1e-9);
        assert_eq!((left.min(), left.max()), (sorted[0], sorted[99_999]));
        let bars = all.bars(8);
        assert_eq!(bars.iter().map(|bar| bar.2).sum::<u64>(), 100_000);
        assert!(bars.windows(2).all(|pair| pair[0].1 == pair[1].0));
    }

    #[test]
    fn a_long_series_is_bounded_and_keeps_every_byte() {
        let mut series = Series::default();
        for hour in 0..48 {
            series.add(hour * 3_600_000, 7);
        }
        assert!(series.bytes.len() <= INTERVALS_MAX);
        assert_eq!(series.bytes.iter().sum::<u64>(), 48 * 7);
        let mut short = Series::default();
        short.add(50, 1);
        short.merge(&series);
        assert_eq!(short.bytes.iter().sum::<u64>(), 48 * 7 + 1);
    }
}
