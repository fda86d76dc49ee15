"""Bayesian optimisation of a mask: a Gaussian process over reals in 0..1, one per sublayer.

By the package bayesian-optimization, which the publications use as well. Masks are proposed while
decoding, and with its defaults one would take as long as hundreds of steps of a small model: so the
next point is sought among fewer random ones, of which one is refined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PlanError

_RANDOM_POINTS = 1000
_REFINED_POINTS = 1


class MaskOptimizer:
    """Proposes points f64 [n] and learns their scores; upper confidence bound, `kappa` standard
    deviations above the mean."""

    def __init__(self, name: str, n: int, kappa: float, seed: int) -> None:
        """`name` of the policy, for the message. Raises PlanError without the package."""
        try:
            from bayes_opt import BayesianOptimization, acquisition
            from threadpoolctl import threadpool_limits  # what bayes_opt computes with needs it
        except ImportError:
            raise PlanError(
                f"the policy {name} needs an optimiser: pip install 'knapspec-edge[policies]'"
            ) from None

        class QuickBound(acquisition.UpperConfidenceBound):  # type: ignore[misc]
            def suggest(self, *args: Any, **options: Any) -> Any:
                few = {"n_random": _RANDOM_POINTS, "n_smart": _REFINED_POINTS}
                return super().suggest(*args, **{**options, **few})

        # small matrices: threads would only wait for each other, and for those of the model
        self._one_thread = threadpool_limits
        self._keys = [f"x{i:04}" for i in range(n)]
        self._optimizer: Any = BayesianOptimization(
            f=None,
            pbounds=dict.fromkeys(self._keys, (0.0, 1.0)),
            acquisition_function=QuickBound(kappa=kappa),
            random_state=seed,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._optimizer.set_gp_params(n_restarts_optimizer=0)

    def suggest(self) -> list[float]:
        """The next point to try; a random one while nothing is known."""
        with self._one_thread(limits=1):
            point = self._optimizer.suggest()
        return [float(point[key]) for key in self._keys]

    def register(self, point: Sequence[float], score: float) -> None:
        self._optimizer.register(dict(zip(self._keys, point, strict=True)), score)
