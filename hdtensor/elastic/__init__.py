"""Changing plans while training: ``plan_switch`` says what moves (pure), ``switch`` moves it (Sec. 7)."""

from hdtensor.elastic.options import SwitchOptions
from hdtensor.elastic.plan_switch import SwitchPlan, plan_switch
from hdtensor.elastic.report import SwitchReport
from hdtensor.elastic.switch import switch, switch_tensors


__all__ = ["SwitchOptions", "SwitchPlan", "SwitchReport", "plan_switch", "switch", "switch_tensors"]
