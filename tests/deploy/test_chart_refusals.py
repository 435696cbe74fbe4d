"""Values that cannot work are refused, with a sentence that names them."""

import pytest

from tests.deploy.helm import CHART, helm, template

EXTERNAL = CHART / "ci" / "external-values.yaml"
POOL = "worker.pools[0]"

NOT_TOGETHER = {
    "no Redis": (
        {"redis.existingSecret": ""},
        "redis: say where Redis is: redis.existingSecret names a Secret with its URL",
    ),
    "two Redis": (
        {"redis.url": "redis://redis"},
        "redis: only one of redis.existingSecret, redis.url and redis.bundled.enabled can be used.",
    ),
    "bundled Redis without password": (
        {"redis.existingSecret": "", "redis.bundled.enabled": "true"},
        "redis.bundled: name a Secret with the password in redis.bundled.existingSecret.",
    ),
    "no database": (
        {"database.existingSecret": ""},
        "database: say where PostgreSQL is: database.existingSecret names a Secret with its URL",
    ),
    "two databases": (
        {"database.bundled.enabled": "true", "database.bundled.existingSecret": "postgres"},
        "database: only one of database.existingSecret, database.url and",
    ),
    "bundled database without password": (
        {"database.existingSecret": "", "database.bundled.enabled": "true"},
        "database.bundled: name a Secret with the password in database.bundled.existingSecret.",
    ),
    "no salt": (
        {"cacheSalt.existingSecret": ""},
        "cacheSalt: name a Secret with a text of your own in cacheSalt.existingSecret",
    ),
    "JWT without issuer": (
        {"jwt.algorithms[0]": "RS256", "jwt.audience": "sluice", "jwt.existingSecret": "jwt"},
        "jwt: jwt.issuer and jwt.audience are required with jwt.algorithms.",
    ),
    "JWT without secret": (
        {"jwt.algorithms[0]": "RS256", "jwt.audience": "sluice", "jwt.issuer": "https://login"},
        "jwt: name a Secret with the HS256 secret or the public keys in jwt.existingSecret.",
    ),
    "gateways from five to two": (
        {
            "gateway.autoscaling.enabled": "true",
            "gateway.autoscaling.minReplicas": "5",
            "gateway.autoscaling.maxReplicas": "2",
        },
        "gateway.autoscaling: minReplicas (5) must not be more than maxReplicas (2).",
    ),
    "gateways scaled by a part of nothing": (
        {"gateway.autoscaling.enabled": "true", "gateway.resources.requests.cpu": "null"},
        "targetCPUUtilizationPercentage is a part of gateway.resources.requests.cpu, which is not set.",
    ),
    "Ingress without host": (
        {"gateway.ingress.enabled": "true"},
        "gateway.ingress: name at least one host in gateway.ingress.hosts.",
    ),
    "HTTPRoute without Gateway": (
        {"gateway.httpRoute.enabled": "true"},
        "gateway.httpRoute: name the Gateway that it belongs to in gateway.httpRoute.parentRefs.",
    ),
    "traces to nowhere": (
        {"tracing.enabled": "true"},
        "tracing: say where the collector is in tracing.endpoint.",
    ),
    "latest": (
        {"image.tag": "latest"},
        "image.tag: name a version instead of `latest`",
    ),
    "two pools of one name": (
        {"worker.pools[1].name": "small", "worker.pools[1].model.path": "/models/other"},
        "worker.pools, small: two pools have this name.",
    ),
    "split in the engine's arguments": (
        {f"{POOL}.engine.arguments.tensor_parallel_size": "2"},
        "worker.pools, small: set gpu.tensorParallelSize instead of engine.arguments.tensor_parallel_size.",
    ),
    "more GPUs than there are": (
        {f"{POOL}.gpu.count": "2", f"{POOL}.gpu.tensorParallelSize": "4"},
        "gpu.count is 2, but the model is split over 4 GPUs (tensorParallelSize 4, times 1",
    ),
    "GPUs that would idle": (
        {f"{POOL}.gpu.count": "8", f"{POOL}.gpu.tensorParallelSize": "4"},
        "gpu.count is 8, but the model is split over 4 GPUs",
    ),
    "pipelines that do not fit": (
        {f"{POOL}.gpu.count": "4", f"{POOL}.engine.arguments.pipeline_parallel_size": "3"},
        "gpu.count is 4, but the model is split over 3 GPUs (tensorParallelSize 1, times 3",
    ),
    "scripted engine on a GPU": (
        {f"{POOL}.engine.kind": "scripted"},
        "worker.pools, small: the scripted engine uses no GPU: set gpu.count to 0.",
    ),
    "leases longer than outages": (
        {f"{POOL}.leaseSeconds": "5"},
        "leaseSeconds (5) must be less than config.resumeAfter (5), or gateways take jobs for lost",
    ),
    "autoscaling without Prometheus": (
        {f"{POOL}.autoscaling.enabled": "true"},
        "autoscaling.prometheus.serverAddress is required: KEDA asks Prometheus",
    ),
    "workers from nine to eight": (
        {
            f"{POOL}.autoscaling.enabled": "true",
            f"{POOL}.autoscaling.prometheus.serverAddress": "http://prometheus",
            f"{POOL}.autoscaling.minReplicas": "9",
        },
        "autoscaling.minReplicas (9) must not be more than maxReplicas (8).",
    ),
    "more jobs than a worker runs": (
        {
            f"{POOL}.autoscaling.enabled": "true",
            f"{POOL}.autoscaling.prometheus.serverAddress": "http://prometheus",
            f"{POOL}.autoscaling.jobsPerReplica": "300",
        },
        "autoscaling.jobsPerReplica (300) must not be more than engine.maxSequences (256)",
    ),
    "several workers on one disk": (
        {
            f"{POOL}.replicas": "3",
            f"{POOL}.modelCache.type": "claim",
            f"{POOL}.modelCache.accessModes[0]": "ReadWriteOnce",
        },
        "modelCache: 3 workers cannot share a claim without the access mode ReadWriteMany.",
    ),
    "claim without name": (
        {f"{POOL}.modelCache.type": "existingClaim"},
        "modelCache: name the claim in modelCache.existingClaim.",
    ),
    "empty volume that is only read": (
        {f"{POOL}.modelCache.readOnly": "true"},
        "modelCache: only an existing claim can be read-only",
    ),
    "workers that cannot be replaced": (
        {f"{POOL}.maxUnavailable": "0"},
        "maxSurge and maxUnavailable cannot both be 0: no worker could ever be replaced.",
    ),
}


@pytest.mark.parametrize(("settings", "sentence"), NOT_TOGETHER.values(), ids=NOT_TOGETHER)
def test_values_that_do_not_go_together(settings: dict[str, str], sentence: str) -> None:
    result = template(EXTERNAL, settings=settings)
    assert result.returncode != 0
    assert sentence in result.stderr


def test_every_problem_is_told_at_once() -> None:
    result = helm("template", "sluice", CHART)
    assert result.returncode != 0
    for part in ("redis: say where", "database: say where", "cacheSalt: name a Secret"):
        assert part in result.stderr


OUT_OF_RANGE = {
    "no gateway": {"gateway.replicaCount": "0"},
    "unknown value": {"gateway.replicas": "3"},
    "unknown setting": {"config.maxWaitingJob": "3"},
    "setting that values make": {"config.redisUrl": "redis://elsewhere"},
    "setting out of range": {"config.maxPrompts": "0"},
    "unknown dialect": {"config.defaultDialect": "cohere"},
    "unknown algorithm": {"jwt.algorithms[0]": "none"},
    "digest": {"gateway.image.digest": "sha256:1234"},
    "pool without model": {"worker.pools[1].name": "other"},
    "pool without name": {"worker.pools[1].model.path": "/models/other"},
    "pool's name": {f"{POOL}.name": "Small"},
    "long name of a pool": {f"{POOL}.name": "abcdefghijklmnopqrstu"},
    "unknown value of a pool": {f"{POOL}.gpus": "2"},
    "unknown engine": {f"{POOL}.engine.kind": "sglang"},
    "negative GPUs": {f"{POOL}.gpu.count": "-1"},
    "lease": {f"{POOL}.leaseSeconds": "0.1"},
    "share": {f"{POOL}.autoscaling.share": "1.5"},
    "worker's setting out of range": {f"{POOL}.config.gatherSeconds": "2"},
    "password that a URL would break at": {"redis.bundled.password": "pass@word"},
    "short salt": {"cacheSalt.value": "short"},
    "other database": {"database.url": "mysql://db/sluice"},
    "other queue": {"redis.url": "http://redis"},
    "budget": {"gateway.podDisruptionBudget.maxUnavailable": "half"},
    "percentage": {"gateway.autoscaling.targetCPUUtilizationPercentage": "120"},
    "port": {"gateway.service.port": "70000"},
    "type of service": {"gateway.service.type": "ExternalName"},
    "path": {"gateway.ingress.paths[0]": "v1"},
    "interval": {"metrics.serviceMonitor.interval": "often"},
    "sampler": {"tracing.sampler": "sometimes"},
    "part of requests": {"tracing.samplerArgument": "2"},
    "amount": {"jobs.resources.requests.memory": "lots"},
}


@pytest.mark.parametrize("settings", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_values_that_the_schema_refuses(settings: dict[str, str]) -> None:
    result = template(EXTERNAL, settings=settings)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
    # The sentence says where: the last part of the path, or the object that has something unknown.
    (path,) = settings
    parts = path.replace("[", ".").replace("]", "").split(".")
    assert any(part in result.stderr for part in parts[-1:] + parts[-2:-1])
