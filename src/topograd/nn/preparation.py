"""Preparation of a stack for a topology: heads, relays, interfaces and frozen parameters.

`prepare` changes the stack once, before an optimizer is built. All others call `check_prepared`, which raises
StackError if something is missing: parameters that are added later are in no optimizer and never learn.
"""

from torch import nn

from topograd.errors import StackError
from topograd.nn.aux_heads import add_auxiliaries
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import parse_interfaces
from topograd.nn.learned_relays import add_relays
from topograd.nn.stack import Stack, check_stack
from topograd.topology.plan import AnyPlan, Plan


def prepare(stack: Stack, topology: AnyPlan) -> Plan:
    """Compile `topology` for `stack`, and make the stack fit it.

    Heads that the topology needs and the stack lacks are added (zero, so that no output changes), and so are
    learned relays and interfaces. Parameters that only frozen stages use get requires_grad=False. Call it
    before you build an optimizer.
    """
    plan = Plan.of(topology, len(check_stack(stack).layers))
    wanted = plan.topology
    stack.validate_plan(plan)
    if wanted.heads == "per-stage":
        stack.add_heads(_own_heads(plan), wanted.head_rank)
    add_relays(stack, wanted)
    add_auxiliaries(stack, plan)
    if wanted.interface is not None:
        settings = parse_interfaces(wanted.interface, len(plan.stages) - 1)
        add_interfaces(stack, settings, len(plan.stages), stack.width, stack.context)
    for parameter in _to_freeze(stack, plan):
        parameter.requires_grad_(False)
    return plan


def check_prepared(stack: Stack, plan: Plan) -> None:
    """Raise StackError if the stack lacks heads or relays of the plan, or does not freeze what it should."""
    if plan.topology.heads == "per-stage":
        missing = [head for head in _own_heads(plan) if not stack.has_head(head)]
        if missing:
            problem = f"stage {missing[0] + 1} has no head of its own and the topology asks for one"
            remedy = "call tg.prepare(stack, topology) before you build the optimizer"
            raise StackError(problem, setting="heads", given="per-stage", remedy=remedy)
    for relay in dict.fromkeys(output.relay for planned in plan.stages for output, _ in planned.inputs):
        try:
            stack.relay(relay)
        except StackError as error:
            raise StackError(
                str(error),
                setting="relay",
                given=relay,
                remedy=(
                    "tg.prepare(stack, topology) adds learned ones and interfaces, "
                    "stack.add_relay one of your own"
                ),
            ) from None
    if any(parameter.requires_grad for parameter in _to_freeze(stack, plan)):
        problem = "the topology has frozen stages and the stack's parameters still learn"
        remedy = "call tg.prepare(stack, topology) before you build the optimizer"
        raise StackError(problem, setting="frozen", given=True, remedy=remedy)


def _own_heads(plan: Plan) -> list[int]:
    """The stages that need a head of their own; a frozen one reads by the head that it has."""
    return [planned.head for planned in plan.stages if planned.predicts and not planned.stage.frozen]


def _to_freeze(stack: Stack, plan: Plan) -> list[nn.Parameter]:
    """The parameters that only frozen stages use; the embedding and the shared head are among them.

    Where stages have heads of their own alone, the shared head stays as it is in any case.
    """
    if not plan.frozen:
        return _shared_head(stack) if plan.topology.own_heads else []
    learning = [planned for planned in plan.stages if not planned.stage.frozen]
    modules = [stack.layers[i] for planned in learning for i in planned.layers]
    received = {output.relay for planned in learning for output, _ in planned.inputs}
    modules += [relay for name, relay in stack.learned_relays().items() if name in received]
    learned = {id(p) for module in modules for p in module.parameters()}
    learned |= {id(p) for planned in learning for p in stack.head_parameters(planned.head)}
    return [parameter for parameter in stack.parameters() if id(parameter) not in learned]


def _shared_head(stack: Stack) -> list[nn.Parameter]:
    head = stack.shared_head
    tables = {id(m.weight) for m in stack.modules() if isinstance(m, nn.Embedding)}
    if head is None or id(head.weight) in tables:
        raise StackError(
            "heads = 'own' needs a shared head that can stay fixed, and this "
            f"{type(stack).__name__}'s is tied to the embedding or is none",
            setting="heads",
            given="own",
            remedy="use 'per-stage'",
        )
    return list(head.parameters(recurse=False))
