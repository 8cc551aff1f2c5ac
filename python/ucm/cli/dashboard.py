"""``ucm dashboard``: Grafana's dashboards and Prometheus's rules, for a file each."""

from __future__ import annotations

import click

from ucm.cli.terminal import document


@click.command()
@click.option(
    "--rules", is_flag=True, help="Print the rules of alerts, for Prometheus's rule_files."
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False),
    help="Make the dashboards of a metrics file instead of UCM Overview.",
)
@click.option("--name", help="Which of several dashboards of the metrics file.")
def dashboard(rules: bool, metrics_file: str | None, name: str | None) -> None:
    """Print the dashboard UCM Overview for Grafana, or rules of alerts for Prometheus.

    ucm dashboard > ucm.json, then import the file in Grafana (docs/monitor.md).
    """
    from ucm.metrics import file  # with pydantic and yaml: not before it is needed

    if rules:
        if metrics_file or name:
            raise click.UsageError("--rules has no options")
        click.echo(file.RULES.read_text(), nl=False)
        return
    made = file.read(metrics_file or file.OVERVIEW)
    found = {one.name: one for one in made.grafana.dashboards}
    if not found:
        raise click.ClickException(f"{metrics_file} has no grafana.dashboards")
    if name is None and len(found) > 1:
        raise click.UsageError(f"write --name, one of: {', '.join(found)}")
    if name is not None and name not in found:
        raise click.BadParameter(f"no dashboard is named {name!r}; there are: {', '.join(found)}")
    chosen = found[name] if name is not None else next(iter(found.values()))
    document(file.dashboard(chosen, made.prometheus.scrape_interval))
