/* Draws every chart from the specs in the page. Colours are CSS variables: dark mode and print need no redraw. */
(async () => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const failed = [];
  for (const place of document.querySelectorAll("[data-chart]")) {
    try {
      await vegaEmbed(place, specs[place.dataset.chart], { renderer: "svg", actions: false, ast: false });
    } catch (error) {
      failed.push(error);
      place.textContent = "This chart could not be drawn; figures/" + place.dataset.chart + ".svg shows it.";
    }
  }
  document.documentElement.dataset.charts = failed.length ? "failed" : "drawn";
  for (const error of failed) console.error(error);
  addEventListener("beforeprint", () => dispatchEvent(new Event("resize")));
})();
