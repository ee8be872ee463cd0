//! Cards on the bus, their links, and which memory they are near to.

use super::{Finding, Level, Root, cpu_list};

/// PCI vendor of NVIDIA.
const NVIDIA: &str = "0x10de";

/// A card on the bus: its address and folder below the root.
struct OnBus {
    address: String,
    folder: String,
}

fn cards(root: &Root) -> Vec<OnBus> {
    let folder = "sys/bus/pci/devices";
    let entries = std::fs::read_dir(root.path(folder)).into_iter().flatten();
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
        .into_iter()
        .map(|address| OnBus {
            folder: format!("{folder}/{address}"),
            address,
        })
        .filter(|card| {
            let is = |file: &str, start: &str| {
                let text = root.text(&format!("{}/{file}", card.folder));
                text.is_some_and(|text| text.starts_with(start))
            };
            // Display controllers: VGA and 3D.
            is("vendor", NVIDIA) && is("class", "0x03")
        })
        .collect()
}

/// Nodes with their cores, by number.
fn nodes(root: &Root) -> Vec<(u32, Vec<usize>)> {
    let folder = "sys/devices/system/node";
    let entries = std::fs::read_dir(root.path(folder)).into_iter().flatten();
    let mut nodes: Vec<(u32, Vec<usize>)> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let number = name.strip_prefix("node")?.parse().ok()?;
            let cores = root.text(&format!("{folder}/{name}/cpulist"))?;
            Some((number, cpu_list(&cores)))
        })
        .collect();
    nodes.sort();
    nodes
}

/// Nodes beside the cores that are allowed, then each card's link and node.
pub(super) fn examine(root: &Root) -> Vec<Finding> {
    let nodes = nodes(root);
    let allowed = root.allowed_cores().unwrap_or_default();
    let near = |node: &(u32, Vec<usize>)| node.1.iter().any(|core| allowed.contains(core));
    let used: Vec<u32> = nodes.iter().filter(|n| near(n)).map(|n| n.0).collect();
    let mut findings = Vec::new();
    match (nodes.len(), &used[..]) {
        (0, _) => findings.push(Finding::unknown("numa", "no /sys/devices/system/node")),
        (1, _) => findings.push(Finding::good("numa", "one node")),
        (count, [one]) => findings.push(Finding::good(
            "numa",
            format!("{count} nodes; this process runs on node {one}"),
        )),
        (count, _) => findings.push(Finding::new(
            Level::Warning,
            "numa",
            format!(
                "this process runs on {} of {count} nodes: much of AdamW's memory is far",
                used.len()
            ),
            "start with numactl --interleave=all, or with --cpunodebind and --membind of one node",
        )),
    }
    for card in cards(root) {
        findings.push(link(root, &card));
        findings.extend(node_of(root, &card, &nodes, &used));
    }
    findings
}

/// The card's node beside those that the process runs on.
fn node_of(
    root: &Root,
    card: &OnBus,
    nodes: &[(u32, Vec<usize>)],
    used: &[u32],
) -> Option<Finding> {
    if nodes.len() < 2 {
        return None;
    }
    let subject = format!("numa of the card {}", card.address);
    let node = root.text(&format!("{}/numa_node", card.folder));
    // −1 is a machine that does not say.
    let Some(node) = node.and_then(|text| text.parse::<u32>().ok()) else {
        return Some(Finding::unknown(&subject, "the firmware does not say"));
    };
    Some(match used.contains(&node) {
        true => Finding::good(&subject, format!("node {node}, as this process")),
        false => Finding::new(
            Level::Bad,
            &subject,
            format!("node {node}; this process runs on others, copies cross the sockets"),
            format!("start with numactl --cpunodebind={node} --membind={node}"),
        ),
    })
}

/// Speed and width of the card's link, now and at most.
fn link(root: &Root, card: &OnBus) -> Finding {
    let subject = format!("pcie of the card {}", card.address);
    let read = |file: &str| root.text(&format!("{}/{file}", card.folder));
    let speed = |file: &str| -> Option<f64> { read(file)?.split(' ').next()?.parse().ok() };
    let width = |file: &str| -> Option<u32> { read(file)?.parse().ok() };
    let (Some(speed_now), Some(speed_most), Some(width_now), Some(width_most)) = (
        speed("current_link_speed"),
        speed("max_link_speed"),
        width("current_link_width"),
        width("max_link_width"),
    ) else {
        return Finding::unknown(&subject, "no link in /sys (a virtual machine may hide it)");
    };
    let found =
        format!("{speed_now} GT/s x{width_now} now, {speed_most} GT/s x{width_most} at most");
    if width_now < width_most {
        let remedy = "seat the card in a slot with all lanes; look at the slot's bifurcation and \
                      at risers";
        return Finding::new(Level::Bad, &subject, found, remedy);
    }
    if speed_now < speed_most {
        let remedy = "an idle card lowers its link: look again while a run is under way";
        return Finding::new(Level::Warning, &subject, found, remedy);
    }
    Finding::good(&subject, found)
}
