"""Settings proposed for a CSV file: what its columns seem to be, and a plan that suits its size."""

from epsilons.proposal.proposed import Proposal, propose, train_command

__all__ = ["Proposal", "propose", "train_command"]
