//! Goal: the store's tests can fail. Method: mistakes on purpose, most of them made by a disk
//! between the store and the simulated one, the others switched on in the store. The random
//! workloads of `store_model` must find each; without a mistake they must find nothing. This file
//! has one test: what is switched on holds for the process.
#![allow(clippy::unwrap_used, reason = "a test ends where it fails")]

#[path = "support/canary.rs"]
mod canary;
#[path = "support/commits.rs"]
mod commits;
#[path = "support/model.rs"]
mod model;
#[path = "support/seeds.rs"]
mod seeds;

use canary::{Canary, Mistake};
use terrace::store::mutant::{Mutant, switch};

/// Seeds within which every mistake must be found; most are found within ten.
const SEEDS: u64 = 20_000;

fn found(mistake: Mistake, seeds: u64) -> Option<(u64, String)> {
    seeds::first_wrong(0..seeds, &|seed| {
        let wrap = |disk, geometry| -> Box<dyn terrace::store::disk::Disk> {
            Box::new(Canary::new(Box::new(disk), geometry, mistake))
        };
        model::run(seed, &wrap).map(|_| ())
    })
}

#[test]
fn every_mistake_is_caught() {
    // A panic of the store counts as caught, and need not be read.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut table: Vec<(String, Option<(u64, String)>)> = Vec::new();
    let none = found(Mistake::None, 300);
    for mistake in Mistake::ALL {
        table.push((format!("{mistake:?}"), found(mistake, SEEDS)));
    }
    if switch(Mutant::None) {
        for mutant in Mutant::ALL {
            switch(mutant);
            table.push((format!("{mutant:?}"), found(Mistake::None, SEEDS)));
        }
        switch(Mutant::None);
    } else {
        println!("SKIP(reason: a release build has no mutants in the store)");
    }
    std::panic::set_hook(hook);
    assert_eq!(none, None, "without a mistake there is nothing to find");
    for (mistake, caught) in &table {
        match caught {
            Some((seed, wrong)) => {
                let wrong = wrong.split("; [").next().unwrap();
                println!("{mistake}: seed {seed}: {wrong}");
            }
            None => println!("{mistake}: NOT CAUGHT"),
        }
    }
    let missed: Vec<&String> = table
        .iter()
        .filter(|row| row.1.is_none())
        .map(|r| &r.0)
        .collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
