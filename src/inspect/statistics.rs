//! What a person asks of numbers: how many are not numbers, their range, mean and spread, and how
//! their magnitudes are distributed.
//!
//! Sums are over finite numbers, in f64, in the order of the elements. The histogram counts by
//! powers of two, so that moments near 1e-12 and weights near 1 show in the same picture.

use std::ops::Range;

use super::values::Values;
use crate::error::Result;

/// Exponents of an f64.
const EXPONENTS: usize = 1 << 11;
const BIAS: i32 = 1023;

/// Statistics of a stream of numbers.
#[derive(Clone)]
pub struct Statistics {
    /// Elements.
    pub count: u64,
    /// Not a number.
    pub nan: u64,
    /// Infinite, of either sign.
    pub infinite: u64,
    /// Zero, of either sign.
    pub zeros: u64,
    /// Smaller than the format's smallest normal number, and not zero.
    pub subnormal: u64,
    /// Index of the first element that is not finite.
    pub first_non_finite: Option<u64>,
    /// Least finite element.
    pub min: f64,
    /// Greatest finite element.
    pub max: f64,
    sum: f64,
    squares: f64,
    /// By binary exponent: negative, positive.
    exponents: Vec<[u64; 2]>,
}

/// Numbers with 2^`exponent` ≤ |x| < 2^(`exponent` + 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Bucket {
    /// The exponent.
    pub exponent: i32,
    /// Negative ones.
    pub negative: u64,
    /// Positive ones.
    pub positive: u64,
}

impl Default for Statistics {
    fn default() -> Statistics {
        Statistics {
            count: 0,
            nan: 0,
            infinite: 0,
            zeros: 0,
            subnormal: 0,
            first_non_finite: None,
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            sum: 0.0,
            squares: 0.0,
            exponents: vec![[0; 2]; EXPONENTS],
        }
    }
}

impl Statistics {
    /// Takes further numbers of a format whose smallest normal one is `normal_min`.
    pub fn take(&mut self, values: &[f64], normal_min: f64) {
        for value in values {
            let index = self.count;
            self.count += 1;
            if !value.is_finite() {
                self.first_non_finite.get_or_insert(index);
                if value.is_nan() {
                    self.nan += 1;
                } else {
                    self.infinite += 1;
                }
                continue;
            }
            self.min = self.min.min(*value);
            self.max = self.max.max(*value);
            self.sum += value;
            self.squares += value * value;
            if *value == 0.0 {
                self.zeros += 1;
                continue;
            }
            self.subnormal += u64::from(value.abs() < normal_min);
            let bits = value.to_bits();
            let exponent = (bits >> 52) as usize % EXPONENTS;
            self.exponents[exponent][usize::from(*value > 0.0)] += 1;
        }
    }

    /// Adds those of other elements of the same format that follow.
    pub fn merge(&mut self, other: &Statistics) {
        let first = other.first_non_finite.map(|index| self.count + index);
        self.first_non_finite = self.first_non_finite.or(first);
        self.count += other.count;
        self.nan += other.nan;
        self.infinite += other.infinite;
        self.zeros += other.zeros;
        self.subnormal += other.subnormal;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum += other.sum;
        self.squares += other.squares;
        for (mine, theirs) in self.exponents.iter_mut().zip(&other.exponents) {
            mine[0] += theirs[0];
            mine[1] += theirs[1];
        }
    }

    /// Finite elements.
    pub fn finite(&self) -> u64 {
        self.count - self.nan - self.infinite
    }

    /// Mean of the finite elements; NaN if there are none.
    pub fn mean(&self) -> f64 {
        self.sum / self.finite() as f64
    }

    /// Standard deviation of the finite elements (of all, not of a sample).
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        (self.squares / self.finite() as f64 - mean * mean)
            .max(0.0)
            .sqrt()
    }

    /// Square root of the sum of squares.
    pub fn norm(&self) -> f64 {
        self.squares.sqrt()
    }

    /// Exponents that occur, ascending. What an f64 cannot hold normally is in the first.
    pub fn histogram(&self) -> Vec<Bucket> {
        let counted = self.exponents.iter().enumerate();
        counted
            .filter(|(_, counts)| counts[0] + counts[1] > 0)
            .map(|(index, counts)| Bucket {
                exponent: index as i32 - BIAS,
                negative: counts[0],
                positive: counts[1],
            })
            .collect()
    }
}

/// Statistics of ranges of the elements that `values` gives, ascending and without overlap.
///
/// # Errors
/// Those of reading.
pub fn measure(values: &mut Values, ranges: &[Range<u64>]) -> Result<Vec<Statistics>> {
    let format = values.format();
    let mut all = vec![Statistics::default(); ranges.len()];
    let (mut first, mut range) = (0, 0);
    let mut numbers = Vec::new();
    while let Some(bytes) = values.next_bytes()? {
        numbers.clear();
        format.widen(bytes, &mut numbers);
        let end = first + numbers.len() as u64;
        while range < ranges.len() && ranges[range].start < end {
            let from = ranges[range].start.max(first);
            let to = ranges[range].end.min(end);
            let part = &numbers[(from - first) as usize..(to.max(from) - first) as usize];
            all[range].take(part, format.normal_min());
            if ranges[range].end > end {
                break;
            }
            range += 1;
        }
        first = end;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_counted_and_kept_out_of_the_rest() {
        let mut statistics = Statistics::default();
        let values = [1.0, -3.0, f64::NAN, 0.0, f64::INFINITY, 1e-45, -0.0];
        statistics.take(&values, f64::from(f32::MIN_POSITIVE));
        assert_eq!((statistics.count, statistics.finite()), (7, 5));
        assert_eq!((statistics.nan, statistics.infinite), (1, 1));
        assert_eq!((statistics.zeros, statistics.subnormal), (2, 1));
        assert_eq!(statistics.first_non_finite, Some(2));
        assert_eq!((statistics.min, statistics.max), (-3.0, 1.0));
        assert!((statistics.mean() + 0.4).abs() < 1e-12);
        assert!((statistics.norm() - 10.0f64.sqrt()).abs() < 1e-12);
        let exponents: Vec<i32> = statistics.histogram().iter().map(|b| b.exponent).collect();
        assert_eq!(exponents, [-150, 0, 1]);
        let mut both = statistics.clone();
        both.merge(&statistics);
        assert_eq!((both.count, both.first_non_finite), (14, Some(2)));
    }
}
