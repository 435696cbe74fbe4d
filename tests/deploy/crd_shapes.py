"""Shapes of the custom resources that the chart makes, as far as the chart uses them (JSON Schema).

Written after the definitions of KEDA 2.16 (keda.sh/v1alpha1), Prometheus operator 0.79
(monitoring.coreos.com/v1) and Gateway API 1.2 (gateway.networking.k8s.io/v1). Fields that are not
named here are refused.
"""

from typing import Any, Final


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _some(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_NUMBER: Final[dict[str, Any]] = {"type": "integer", "minimum": 0}
_LABELS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": _TEXT}
_DECIMAL: Final[dict[str, Any]] = {"type": "string", "pattern": r"^\d+(\.\d+)?$"}
_DURATION: Final[dict[str, Any]] = {"type": "string", "pattern": r"^(\d+(ms|[smhdwy]))+$"}
_SELECTOR: Final = _closed(
    matchLabels=_LABELS,
    matchExpressions=_some(
        _closed(("key", "operator"), key=_TEXT, operator={"enum": ["In"]}, values=_some(_TEXT))
    ),
)
_SCALING: Final = _closed(
    ("policies",),
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=_some(
        _closed(
            ("type", "value", "periodSeconds"),
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
_TRIGGER: Final = _closed(
    ("type", "metadata"),
    type={"const": "prometheus"},
    name=_TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    # KEDA reads every one of these as text.
    metadata=_closed(
        ("serverAddress", "query", "threshold"),
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=_TEXT,
        threshold=_DECIMAL,
        activationThreshold=_DECIMAL,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
    authenticationRef=_closed(("name",), name=_TEXT),
)
_ENDPOINT: Final = _closed(
    ("port",),
    port=_TEXT,
    path={"const": "/metrics"},
    interval=_DURATION,
    relabelings=_some(
        _closed(("targetLabel",), sourceLabels=_some(_TEXT), targetLabel=_TEXT, replacement=_TEXT)
    ),
)
_RULE: Final = _closed(
    ("expr",),
    record=_TEXT,
    alert=_TEXT,
    expr={"type": ["string", "integer"]},
    labels=_LABELS,
    annotations=_LABELS,
    **{"for": _DURATION, "keep_firing_for": _DURATION},
)

SHAPES: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("keda.sh/v1alpha1", "ScaledObject"): _closed(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_closed(("name",), name=_TEXT),
        minReplicaCount=_NUMBER,
        maxReplicaCount=_NUMBER,
        pollingInterval=_NUMBER,
        cooldownPeriod=_NUMBER,
        fallback=_closed(
            ("failureThreshold", "replicas"), failureThreshold=_NUMBER, replicas=_NUMBER
        ),
        advanced=_closed(
            horizontalPodAutoscalerConfig=_closed(
                behavior=_closed(scaleUp=_SCALING, scaleDown=_SCALING)
            )
        ),
        triggers=_some(_TRIGGER),
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _closed(
        ("selector", "endpoints"), selector=_SELECTOR, endpoints=_some(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _closed(
        ("selector", "podMetricsEndpoints"),
        selector=_SELECTOR,
        podMetricsEndpoints=_some(_ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ("groups",),
        groups=_some(
            _closed(("name", "rules"), name=_TEXT, interval=_DURATION, rules=_some(_RULE))
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _closed(
        ("parentRefs", "rules"),
        parentRefs=_some(_closed(("name",), name=_TEXT, namespace=_TEXT, sectionName=_TEXT)),
        hostnames=_some(_TEXT),
        rules=_some(
            _closed(
                ("matches", "backendRefs"),
                matches=_some(
                    _closed(
                        path=_closed(
                            ("type", "value"),
                            type={"const": "PathPrefix"},
                            value={"type": "string", "pattern": "^/"},
                        )
                    )
                ),
                timeouts=_closed(
                    request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                ),
                backendRefs=_some(_closed(("name", "port"), name=_TEXT, port=_NUMBER)),
            )
        ),
    ),
}
"""Shape of `spec` by API version and kind."""
