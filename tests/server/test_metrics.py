from prometheus_client import CollectorRegistry, generate_latest

from topkd.server.metrics import LATENCY_BUCKETS, MergedCollector, ServerMetrics, Snapshot, k_class


def make() -> tuple[ServerMetrics, Snapshot]:
    metrics = ServerMetrics(CollectorRegistry())
    return metrics, Snapshot(metrics.registry)


def read(collector: MergedCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def test_buckets_are_a_log_scale_from_1us_to_1s() -> None:
    assert LATENCY_BUCKETS[0] == 1e-6
    assert LATENCY_BUCKETS[-1] == 1.0
    assert list(LATENCY_BUCKETS) == sorted(set(LATENCY_BUCKETS))


def test_k_classes() -> None:
    assert [k_class(k) for k in (1, 64, 65, 512, 2048, 4096, 4097)] == [
        "<=64", "<=64", "<=512", "<=512", "<=2048", "<=4096", ">4096",
    ]  # fmt: skip


def test_only_changes_travel() -> None:
    metrics, snapshot = make()
    assert snapshot.changes()
    assert snapshot.changes() == []
    metrics.rows.inc(3)
    assert snapshot.changes() == [["topkd_rows", "topkd_rows_total", {}, 3.0]]


def test_sources_add_up_and_counters_never_go_down() -> None:
    own, _ = make()
    collector = MergedCollector(own.registry)
    workers = [make() for _ in range(2)]
    for number, (metrics, snapshot) in enumerate(workers):
        metrics.rows.inc(10)
        metrics.regions.labels("memfd").set(2)
        metrics.kernel_seconds.labels("torch", "float32", "<=64").observe(2e-6)
        collector.update(number, snapshot.changes())
    own.requests.labels("GetServerInfo", "OK").inc()
    seen = read(collector)
    assert seen["topkd_rows_total"] == 20
    assert seen['topkd_regions{memory="memfd"}'] == 4
    assert seen['topkd_requests_total{code="OK",method="GetServerInfo"}'] == 1
    collector.retire(0)
    seen = read(collector)
    assert seen["topkd_rows_total"] == 20
    assert seen['topkd_regions{memory="memfd"}'] == 2
    assert seen['topkd_kernel_seconds_bucket{dtype="float32",k="<=64",kernel="torch",le="1.8e-06"}'] == 0
    assert seen['topkd_kernel_seconds_bucket{dtype="float32",k="<=64",kernel="torch",le="+Inf"}'] == 2
    collector.retire(1)
    collector.retire(1)
    seen = read(collector)
    assert seen["topkd_rows_total"] == 20
    assert 'topkd_regions{memory="memfd"}' not in seen


def test_a_ratio_is_the_highest_of_all() -> None:
    own, _ = make()
    collector = MergedCollector(own.registry)
    for number, fill in enumerate((0.25, 0.75, 0.5)):
        metrics, snapshot = make()
        metrics.queue_fill.set(fill)
        collector.update(number, snapshot.changes())
    assert read(collector)["topkd_queue_fill_ratio"] == 0.75
    collector.retire(1)
    assert read(collector)["topkd_queue_fill_ratio"] == 0.5


def test_figures_are_refreshed_before_a_reading() -> None:
    own, _ = make()
    collector = MergedCollector(own.registry, lambda: own.ready.set(7))
    assert read(collector)["topkd_ready"] == 7


def test_names_are_base_units_and_say_what_they_count() -> None:
    own, _ = make()
    for family in own.registry.collect():
        assert family.name.startswith("topkd_")
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_us", "_ns", "_percent", "_kib", "_mib"))
        assert family.type != "histogram" or family.name.endswith(("_seconds", "_items"))


def test_cumulative_samples_replace_and_foreign_families_are_ignored() -> None:
    own, _ = make()
    collector = MergedCollector(own.registry)
    metrics, snapshot = make()
    for _ in range(3):
        metrics.rows.inc()
        collector.update("w", snapshot.changes())
    collector.update("w", [["evil", "evil_total", {}, 1.0]])
    seen = read(collector)
    assert seen["topkd_rows_total"] == 3
    assert not any("evil" in name for name in seen)


def test_buckets_come_in_order() -> None:
    own, _ = make()
    collector = MergedCollector(own.registry)
    metrics, snapshot = make()
    metrics.queue_seconds.observe(1e-3)
    collector.update("w", snapshot.changes())
    family = next(family for family in collector.collect() if family.name == "topkd_queue_seconds")
    bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
    assert bounds == sorted(bounds)
    assert len(bounds) == len(LATENCY_BUCKETS) + 1
