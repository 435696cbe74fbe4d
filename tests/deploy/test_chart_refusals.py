"""Values that cannot work are refused, with a message that names them."""

from collections.abc import Callable, Iterable

from tests.deploy.helm import CHART, helm, template
from tests.support.cases import all_cases

EXTERNAL = CHART / "ci" / "external-values.yaml"
POOL = "worker.pools[0]"

NOT_TOGETHER = {
    "annotations for two processes": (
        {"metrics.scrapeAnnotations": "true", "gateway.processes": "2"},
        "gateway.processes: metrics.scrapeAnnotations can name the port of only one process.",
    ),
    "no Redis": (
        {"redis.existingSecret": ""},
        "redis: set redis.existingSecret to a Secret with the URL of Redis",
    ),
    "two Redis": (
        {"redis.url": "redis://redis"},
        "redis: only one of redis.existingSecret, redis.url and redis.bundled.enabled can be used.",
    ),
    "bundled Redis without password": (
        {"redis.existingSecret": "", "redis.bundled.enabled": "true"},
        "redis.bundled: set redis.bundled.existingSecret to a Secret with the passwords.",
    ),
    "certificate of another Redis": (
        {
            "redis.caExistingSecret": "redis-ca",
            "redis.existingSecret": "",
            "redis.bundled.enabled": "true",
        },
        "redis.caExistingSecret: the bundled Redis has its CA certificate in",
    ),
    "cluster as broker": (
        {
            "redis.url": "redis://a?cluster=true",
            "redis.existingSecret": "",
            "redis.brokerExistingSecret": "",
        },
        "redis.url: a cluster requires redis.brokerExistingSecret",
    ),
    "no database": (
        {"database.existingSecret": ""},
        "database: set database.existingSecret to a Secret with the URL of PostgreSQL",
    ),
    "two databases": (
        {"database.bundled.enabled": "true", "database.bundled.existingSecret": "postgres"},
        "database: only one of database.existingSecret, database.url and",
    ),
    "bundled database without password": (
        {"database.existingSecret": "", "database.bundled.enabled": "true"},
        "database.bundled: set database.bundled.existingSecret to a Secret with the password.",
    ),
    "no salt": (
        {"cacheSalt.existingSecret": ""},
        "cacheSalt: set cacheSalt.existingSecret to a Secret with a random text",
    ),
    "JWT without issuer": (
        {"jwt.algorithms[0]": "RS256", "jwt.audience": "sluice", "jwt.existingSecret": "jwt"},
        "jwt: jwt.issuer and jwt.audience are required with jwt.algorithms.",
    ),
    "JWT without secret": (
        {"jwt.algorithms[0]": "RS256", "jwt.audience": "sluice", "jwt.issuer": "https://login"},
        "jwt: set jwt.existingSecret to a Secret with the HS256 secret or the public keys.",
    ),
    "OpenID provider without a client": (
        {"oidc.issuer": "https://login"},
        "oidc: oidc.issuer and oidc.clientId require each other.",
    ),
    "claim of operators without a value": (
        {"oidc.issuer": "https://login", "oidc.clientId": "x", "oidc.operatorClaim": "groups"},
        "oidc: oidc.operatorClaim requires oidc.operatorValues or oidc.operatorReaderValues",
    ),
    "neither keys nor a provider": (
        {"oidc.keyLogin": "false"},
        "oidc: oidc.operatorClaim and oidc.keyLogin=false require oidc.issuer.",
    ),
    "mail without a sender": (
        {"mail.existingSecret": "sluice"},
        "mail.from: set the address of the sender, since mail.existingSecret is set.",
    ),
    "signed heads without a key": (
        {"audit.sink": "https://audit.example.com/heads"},
        "audit: set audit.existingSecret to a Secret with the signing key",
    ),
    "JWT with an operator's value and no claim": (
        {
            "jwt.algorithms[0]": "RS256",
            "jwt.audience": "sluice",
            "jwt.issuer": "https://login",
            "jwt.existingSecret": "jwt",
            "jwt.operatorValue": "sluice-operators",
        },
        (
            "jwt: jwt.operatorClaim requires jwt.operatorValue or jwt.operatorReaderValue, "
            "and either of them requires jwt.operatorClaim."
        ),
    ),
    "groups of JWTs without roles": (
        {
            "jwt.algorithms[0]": "RS256",
            "jwt.audience": "sluice",
            "jwt.issuer": "https://login",
            "jwt.existingSecret": "jwt",
            "jwt.roleClaim": "groups",
        },
        "oidc: oidc.roles requires oidc.roleClaim with oidc.issuer, or jwt.roleClaim",
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
        "targetCPUUtilizationPercentage requires gateway.resources.requests.cpu, which is not set.",
    ),
    "Ingress without host": (
        {"gateway.ingress.enabled": "true"},
        "gateway.ingress: set gateway.ingress.hosts to at least one host.",
    ),
    "HTTPRoute without Gateway": (
        {"gateway.httpRoute.enabled": "true"},
        "gateway.httpRoute: set gateway.httpRoute.parentRefs to the Gateways of the route.",
    ),
    "traces to nowhere": (
        {"tracing.enabled": "true"},
        "tracing: set tracing.endpoint to the address of the collector.",
    ),
    "authority of a server without TLS": (
        {"database.existingSecret": "", "database.bundled.enabled": "true"}
        | {"database.bundled.password": "x", "database.caExistingSecret": "ca"},
        "database.caExistingSecret: the bundled PostgreSQL has no TLS.",
    ),
    "latest": (
        {"image.tag": "latest"},
        "image.tag: set a version instead of `latest`",
    ),
    "two pools of one name": (
        {"worker.pools[1].name": "small", "worker.pools[1].model.path": "/models/other"},
        "worker.pools, small: the pool's name is not unique.",
    ),
    "split in the engine's arguments": (
        {f"{POOL}.engine.arguments.tensor_parallel_size": "2"},
        (
            "worker.pools, small: set gpu.tensorParallelSize instead of "
            "engine.arguments.tensor_parallel_size."
        ),
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
        "leaseSeconds (5) must be less than config.resumeAfter (5), or gateways resume jobs",
    ),
    "pool with a model and a host": (
        {"worker.pools[1].name": "both", "worker.pools[1].model.path": "m"}
        | {"worker.pools[1].host.models[0].model.path": "m"},
        "worker.pools, both: only one of model and host can be used.",
    ),
    "two models of one name": (
        {"worker.pools[1].name": "twice", "worker.pools[1].host.models[0].model.path": "a/m"}
        | {"worker.pools[1].host.models[1].model.path": "b/m"},
        "worker.pools, twice: host.models, m: the model's name is not unique.",
    ),
    "host's model on too few GPUs": (
        {"worker.pools[1].name": "split", "worker.pools[1].host.models[0].model.path": "a/m"}
        | {"worker.pools[1].host.models[0].engine.arguments.pipeline_parallel_size": "2"},
        "worker.pools, split: host.models, m: gpu.count is 1, but the model is split over 2 GPUs",
    ),
    "autoscaling without Prometheus": (
        {f"{POOL}.autoscaling.enabled": "true"},
        "autoscaling.prometheus.serverAddress is required: KEDA reads the number of jobs",
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
        "modelCache: set modelCache.existingClaim to the name of the claim.",
    ),
    "empty volume that is only read": (
        {f"{POOL}.modelCache.readOnly": "true"},
        "modelCache: only an existing claim can be read-only",
    ),
    "workers that cannot be replaced": (
        {f"{POOL}.maxUnavailable": "0"},
        "maxSurge and maxUnavailable cannot both be 0: no worker could be replaced.",
    ),
}


def refusal(
    settings: dict[str, str], others: Iterable[dict[str, str]], topic: Callable[[str], str]
) -> str:
    """Return what Helm prints for `settings` and all others that can be refused in the same run.

    Helm reports every problem at once (`test_every_problem_is_reported_at_once`), and starts
    slowly. Settings on the same topic go into different runs.
    """
    runs: list[dict[str, str]] = []
    for each in others:
        topics = {topic(name) for name in each}
        fitting = (run for run in runs if topics.isdisjoint(map(topic, run)))
        if (run := next(fitting, None)) is None:
            runs.append(run := {})
        run |= each
    mine = next(run for run in runs if settings.items() <= run.items())
    result = template(EXTERNAL, settings=mine)
    assert result.returncode != 0
    return result.stderr


def section(name: str) -> str:
    """Return the part of the values in which values depend on each other."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "gateway" else parts[0]


def member(name: str) -> str:
    """Return the unit that the schema checks: a value, or an entry of a new list."""
    return "worker.pools[1]" if name.startswith("worker.pools[1].") else name


@all_cases(("settings", "sentence"), NOT_TOGETHER.values(), ids=NOT_TOGETHER)
def test_conflicting_values_are_refused(settings: dict[str, str], sentence: str) -> None:
    assert sentence in refusal(settings, (each for each, _ in NOT_TOGETHER.values()), section)


def test_every_problem_is_reported_at_once() -> None:
    result = helm("template", "sluice", CHART)
    assert result.returncode != 0
    for part in ("redis: set redis.", "database: set database.", "cacheSalt: set cacheSalt."):
        assert part in result.stderr


OUT_OF_RANGE = {
    "no gateway": ("gateway.replicaCount", "0", "gateway.replicaCount: Must be greater"),
    "no process": ("gateway.processes", "0", "gateway.processes: Must be greater"),
    "unknown value": ("gateway.replicas", "3", "gateway: Additional property replicas"),
    "unknown setting": ("config.maxWaitingJob", "3", "config: Additional property maxWaitingJob"),
    "setting that values make": (
        "config.redisUrl",
        "redis://r",
        "config: Additional property redisUrl",
    ),
    "setting out of range": ("config.maxPrompts", "0", "config.maxPrompts: Must be greater"),
    "unknown dialect": ("config.defaultDialect", "cohere", "config.defaultDialect must be one of"),
    "unknown algorithm": ("jwt.algorithms[0]", "none", "jwt.algorithms.0 must be one of"),
    "digest": ("gateway.image.digest", "sha256:1234", "gateway.image.digest: Does not match"),
    "pool without model": ("worker.pools[1].name", "other", "worker.pools.1: model is required"),
    "pool without name": ("worker.pools[1].model.path", "/m", "worker.pools.1: name is required"),
    "host without models": (
        "worker.pools[1].host.config.ratio",
        "2",
        "worker.pools.1.host: models is required",
    ),
    "host's model without model": (
        f"{POOL}.host.models[0].engine.kind",
        "vllm",
        "worker.pools.0.host.models.0: model is required",
    ),
    "host's setting": (
        "worker.pools[1].host.config.ratio",
        "0.5",
        "worker.pools.1.host.config.ratio: Must be greater than or equal to 1",
    ),
    "setting that the host makes": (
        f"{POOL}.host.config.healthPort",
        "1",
        "worker.pools.0.host.config: Additional property healthPort",
    ),
    "pool's name": (f"{POOL}.name", "Small", "worker.pools.0.name: Does not match"),
    "pool's long name": (
        f"{POOL}.name",
        "abcdefghijklmnopqrstu",
        "must be less than or equal to 20",
    ),
    "unknown value of a pool": (f"{POOL}.gpus", "2", "worker.pools.0: Additional property gpus"),
    "unknown engine": (f"{POOL}.engine.kind", "sglang", "engine.kind must be one of"),
    "negative GPUs": (f"{POOL}.gpu.count", "-1", "worker.pools.0.gpu.count: Must be greater"),
    "lease": (f"{POOL}.leaseSeconds", "0.1", "leaseSeconds: Must be greater than or equal to 0.3"),
    "share": (f"{POOL}.autoscaling.share", "1.5", "autoscaling.share: Must be less"),
    "no share": (f"{POOL}.autoscaling.share", "0", "autoscaling.share: Must be greater than 0"),
    "worker's setting": (f"{POOL}.config.gatherSeconds", "2", "config.gatherSeconds: Must be less"),
    "password that a URL would break at": (
        "redis.bundled.password",
        "pass@word",
        "redis.bundled.password: Does not match",
    ),
    "short salt": ("cacheSalt.value", "short", "cacheSalt.value: Does not match"),
    "other database": ("database.url", "mysql://db/sluice", "database.url: Does not match"),
    "other queue": ("redis.url", "http://redis", "redis.url: Does not match"),
    "budget": ("jobs.podDisruptionBudget.maxUnavailable", "half", "maxUnavailable: Does not match"),
    "percentage": (
        "gateway.autoscaling.targetCPUUtilizationPercentage",
        "120",
        "targetCPUUtilizationPercentage: Must be less than or equal to 100",
    ),
    "port": ("gateway.service.port", "70000", "gateway.service.port: Must be less"),
    "type of service": ("gateway.service.type", "ExternalName", "service.type must be one of"),
    "path": ("gateway.ingress.paths[0]", "v1", "gateway.ingress.paths.0: Does not match"),
    "sink": ("audit.sink", "ftp://audit", "audit.sink: Does not match"),
    "interval": ("metrics.serviceMonitor.interval", "often", "interval: Does not match"),
    "sampler": ("tracing.sampler", "sometimes", "tracing.sampler must be one of"),
    "amount": ("jobs.resources.requests.memory", "lots", "requests.memory: Does not match"),
}


@all_cases(("name", "value", "sentence"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_invalid_values_are_refused_by_the_schema(name: str, value: str, sentence: str) -> None:
    others = ({name: value} for name, value, _ in OUT_OF_RANGE.values())
    reported = refusal({name: value}, others, member)
    assert "values don't meet the specifications of the schema" in reported
    assert sentence in reported
