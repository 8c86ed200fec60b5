"""The limits of each remedy: the settings, with the changes of the policy file."""

from dataclasses import replace

from remediator.plan import Limits
from remediator.remedies.guards import SafetyLimits
from remediator.settings.policy_file import JobRemedyPolicy, Policies, PolicyFile


class RemedyLimits:
    """The limits of each remedy."""

    def __init__(self, policy: PolicyFile | None, *, limits: Limits, safety_limits: SafetyLimits) -> None:
        self._policy = policy
        self.limits = limits
        self.safety_limits = safety_limits

    def limits_of(self, remedy: str) -> Limits:
        """The limits of a remedy."""
        policy = self._policies().of(remedy)
        if not isinstance(policy, JobRemedyPolicy):
            return self.limits
        retries_max = self.limits.retries_max if policy.retries_max is None else policy.retries_max
        return replace(
            self.limits,
            unconfirmed=policy.unconfirmed,
            retries_max=retries_max,
            warn_signal=policy.warn_signal,
            warn_grace_s=policy.warn_grace_s,
        )

    def safety_limits_of(self, remedy: str) -> SafetyLimits:
        """The safety limits of a remedy."""
        cooldown_s = self._policies().of(remedy).cooldown_s
        return self.safety_limits if cooldown_s is None else replace(self.safety_limits, cooldown_s=cooldown_s)

    def _policies(self) -> Policies:
        return Policies() if self._policy is None else self._policy.now()
